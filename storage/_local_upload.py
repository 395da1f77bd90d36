"""Files on their way onto a disk: parts go into a scratch file, and a journal tells which of them arrived."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptguard.errors import Refused, StoreError
from ckptguard.model import Entry
from ckptguard.storage._base import PartReceipt
from ckptguard.storage._crc64 import crc64

if TYPE_CHECKING:
    from ckptguard.storage.local import LocalStore

PART = 16 << 20
SUFFIX = ".ckptguard-part"


class LocalUpload:
    """One file on its way into a local store. Only one process at a time can write it; a killed one is gone on with."""

    part_size = PART
    journaled = True

    def __init__(self, store: LocalStore, key: str, size: int, source: str, replace: Entry | None) -> None:
        self._store, self._key, self._size, self._source = store, key, size, source
        self._replace = replace
        self._final = store.path(key)
        self._scratch = self._final.with_name(f".{self._final.name}{SUFFIX}")
        self._lock = threading.Lock()
        try:
            self._final.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._scratch, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(
                f"{key}: cannot be written: {error.strerror}", "check permissions and space"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise Refused(f"{key}: another process is writing it", "wait until it has finished") from None
        self._journal_path = self._scratch.with_name(f"{self._scratch.name}.journal")
        self._received = self._read_journal()
        # Line buffered: a part is noted when it has been written, and a torn last line is ignored.
        self._journal = self._journal_path.open("a" if self._received else "w", buffering=1)
        if not self._received:
            os.ftruncate(self._fd, 0)
            self._journal.write(json.dumps({"source": source, "size": size}) + "\n")

    def _read_journal(self) -> dict[int, PartReceipt]:
        """The parts that an earlier process noted, and whose bytes are still what it noted."""
        try:
            head, *lines = self._journal_path.read_text().splitlines()
            if json.loads(head) != {"source": self._source, "size": self._size}:
                return {}
            noted = [json.loads(line) for line in lines if line.endswith("}")]
            receipts = {
                n["number"]: PartReceipt(n["number"], n["size"], "", crc64nvme=n["crc64nvme"]) for n in noted
            }
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {n: r for n, r in receipts.items() if crc64(self._bytes(n, r.size)) == r.crc64nvme}

    def _bytes(self, number: int, size: int) -> bytes:
        return os.pread(self._fd, size, (number - 1) * PART)

    def received(self) -> Mapping[int, PartReceipt]:
        return dict(self._received)

    def send(self, number: int, data: memoryview) -> PartReceipt:
        done, start = 0, (number - 1) * PART
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], start + done)
        except OSError as error:
            raise StoreError(
                f"{self._key}: {error.strerror}", "make room, then repeat: it goes on where it stopped"
            ) from error
        receipt = PartReceipt(number, len(data), "", crc64nvme=crc64(data))
        note: dict[str, Any] = {"number": number, "size": len(data), "crc64nvme": receipt.crc64nvme}
        with self._lock:
            self._journal.write(json.dumps(note) + "\n")
        return receipt

    def finish(self, parts: Mapping[int, PartReceipt], crc64nvme: str) -> Entry:
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)
        if self._replace is None:
            try:
                os.link(self._scratch, self._final)
            except FileExistsError:
                self._close()
                raise Refused(
                    f"{self._key}: exists already; it was left as it is", "look at both, then repeat"
                ) from None
            self._scratch.unlink()
        else:
            self._replace_the_same(self._replace)
        folder = os.open(self._final.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        self._close()
        self._journal_path.unlink(missing_ok=True)
        # The store may hold the file open that lay here before.
        self._store.forget()
        return self._store.stat(self._key)

    def _replace_the_same(self, expected: Entry) -> None:
        if self._store.stat(self._key).identity != expected.identity:
            self._close()
            raise Refused(f"{self._key}: changed meanwhile; it was left as it is", "look again, then repeat")
        self._scratch.replace(self._final)

    def abort(self) -> None:
        self._close()
        self._scratch.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the scratch file and keep it, for a later process to go on with."""
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            self._journal.close()
            os.close(self._fd)
            self._fd = -1

"""Checkpoints on a file system of this machine: disk, NFS, Lustre."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from ckptguard.errors import KeyNotFound, Refused, ShortRead, StoreDenied, StoreError, TargetNotFound
from ckptguard.model import Entry
from ckptguard.ports import Traits
from ckptguard.storage._base import InOrder, Upload

OPEN_FILES = 64


class LocalStore:
    """Keys are paths below `root`. `uncached` drops each file's pages from the page cache before reading it."""

    traits = Traits(local=True)

    def __init__(self, root: str | Path, *, uncached: bool = False, considerate: bool = False) -> None:
        self.root = Path(root)
        self.url = str(root)
        self.uncached = uncached
        self.considerate = considerate
        self._real = self.root.resolve()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        if not self.root.exists():
            raise TargetNotFound(f"{root}: no such directory", "check the path; is the volume mounted?")

    def path(self, key: str) -> Path:
        """The file system's path of a key. Raises StoreError for a key that would lead outside the root."""
        if key.startswith("/") or ".." in key.split("/"):
            raise StoreError(f"{key}: not a key below {self.url}")
        return self.root / key if key else self.root

    # --- listing ------------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[Entry]:
        try:
            root = self._real.stat()
        except OSError as error:
            raise _translate(error, self.url) from error
        yield from self._walk(self.path(prefix), prefix, frozenset({(root.st_dev, root.st_ino)}))

    def _walk(self, folder: Path, prefix: str, seen: frozenset[tuple[int, int]]) -> Iterator[Entry]:
        try:
            with os.scandir(folder) as scan:
                items = sorted(scan, key=lambda e: e.name)
        except FileNotFoundError:
            return
        except OSError as error:
            # One closed folder must not hide the others: it is listed as something that cannot be opened.
            yield Entry(prefix, 0, 0.0, kind="other", target=os.strerror(error.errno or errno.EIO))
            return
        for item in items:
            key = f"{prefix}/{item.name}" if prefix else item.name
            try:
                yield from self._entry(item, key, seen)
            except FileNotFoundError:
                continue

    def _entry(self, item: os.DirEntry[str], key: str, seen: frozenset[tuple[int, int]]) -> Iterator[Entry]:
        if item.is_symlink():
            yield from self._link(item, key, seen)
        elif item.is_dir(follow_symlinks=False):
            info = item.stat(follow_symlinks=False)
            mark = (info.st_dev, info.st_ino)
            yield Entry(key, 0, info.st_mtime, kind="directory")
            if mark not in seen:
                yield from self._walk(Path(item.path), key, seen | {mark})
        else:
            info = item.stat(follow_symlinks=False)
            kind = "file" if stat.S_ISREG(info.st_mode) else "other"
            yield Entry(key, info.st_size, info.st_mtime, kind=kind)

    def _link(self, item: os.DirEntry[str], key: str, seen: frozenset[tuple[int, int]]) -> Iterator[Entry]:
        target = str(Path(item.path).readlink())
        resolved: str | None = None
        size, modified = 0, item.stat(follow_symlinks=False).st_mtime
        try:
            real = Path(item.path).resolve(strict=True)
            info = real.stat()
        except (OSError, RuntimeError):
            yield Entry(key, 0, modified, kind="link", target=target)
            return
        if real.is_relative_to(self._real):
            resolved = real.relative_to(self._real).as_posix()
        if stat.S_ISDIR(info.st_mode):
            yield Entry(key, 0, modified, kind="link", target=target, resolved=resolved)
            mark = (info.st_dev, info.st_ino)
            # A folder linked in from elsewhere (a bigger volume) belongs to the run; one inside is listed already, and
            # one above leads back here.
            if resolved is None and mark not in seen and not self._real.is_relative_to(real):
                yield from self._walk(Path(item.path), key, seen | {mark})
            return
        size = info.st_size
        if resolved is None and stat.S_ISREG(info.st_mode):
            yield Entry(key, size, info.st_mtime, kind="file", target=target)
        else:
            yield Entry(key, size, modified, kind="link", target=target, resolved=resolved)

    def stat(self, key: str) -> Entry:
        path = self.path(key)
        try:
            info = path.stat()
        except OSError as error:
            raise _translate(error, key) from error
        kind = (
            "file" if stat.S_ISREG(info.st_mode) else "directory" if stat.S_ISDIR(info.st_mode) else "other"
        )
        return Entry(key, info.st_size, info.st_mtime, kind=kind)

    # --- reading ------------------------------------------------------------------------------------

    def _fd(self, key: str) -> int:
        """An open descriptor, duplicated so that no other thread can close it under the caller."""
        with self._lock:
            fd = self._open.get(key)
            if fd is None:
                path = self.path(key)
                try:
                    # O_NONBLOCK: a FIFO that took the file's place must not hang the audit.
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                except OSError as error:
                    raise _translate(error, key) from error
                if self.uncached:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self._open[key] = fd
                while len(self._open) > OPEN_FILES:
                    os.close(self._open.popitem(last=False)[1])
            else:
                self._open.move_to_end(key)
            return os.dup(fd)

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        fd = self._fd(key)
        try:
            done, wanted = 0, len(buffer)
            while done < wanted:
                got = os.preadv(fd, [buffer[done:]], start + done)
                if got == 0:
                    raise ShortRead(f"{key}: ends at byte {start + done}, {wanted - done} more were expected")
                done += got
            if self.considerate:
                os.posix_fadvise(fd, start, wanted, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise _translate(error, key) from error
        finally:
            os.close(fd)

    def stream(self, key: str, start: int, end: int) -> InOrder:
        return InOrder(self, key, start)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if length is None:
            length = max(0, self.stat(key).size - start)
        buffer = bytearray(length)
        self.readinto(key, start, memoryview(buffer))
        return bytes(buffer)

    def fresh(self, key: str) -> LocalStore | None:
        return LocalStore(self.root, uncached=True)

    def forget(self) -> None:
        """Close every descriptor, so that the next read sees the files that are there now."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    close = forget

    def __del__(self) -> None:
        if hasattr(self, "_open"):
            self.forget()

    # --- writing, for the commands that were asked to -----------------------------------------------

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> Entry:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            with scratch.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if if_absent:
                try:
                    os.link(scratch, path)
                except FileExistsError:
                    raise Refused(f"{key} exists already") from None
            else:
                scratch.replace(path)
            _sync_folder(path.parent)
        except OSError as error:
            raise _translate(error, key) from error
        finally:
            scratch.unlink(missing_ok=True)
            self.forget()
        return self.stat(key)

    def receive(self, key: str, size: int, source: str, *, replace: Entry | None = None) -> Upload:
        """A big file on its way here; see `Receiving`."""
        from ckptguard.storage._local_upload import LocalUpload

        return LocalUpload(self, key, size, source, replace)

    def delete(self, key: str) -> None:
        try:
            self.path(key).unlink()
        except OSError as error:
            raise _translate(error, key) from error


def _sync_folder(folder: Path) -> None:
    """A rename is durable only once its folder is."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _translate(error: OSError, key: str) -> StoreError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return KeyNotFound(f"{key}: no such file")
    if error.errno in (errno.EACCES, errno.EPERM):
        return StoreDenied(f"{key}: permission denied", "run as a user that may read it")
    return StoreError(f"{key}: {os.strerror(error.errno or errno.EIO)}")

"""Copies a file from one store to another and proves that what arrived is what was sent."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from ckptguard.errors import KeyNotFound, Refused, StoreError
from ckptguard.model import Entry
from ckptguard.ports import Store, WritableStore
from ckptguard.storage._base import PartReceipt, Proof, Proving, Receiving, Upload
from ckptguard.storage._crc64 import crc64, decode, encode, join
from ckptguard.storage.checksums import Answer, Comparison, choose, compare, crc64_of

THREADS = 4
BLOCK = 8 << 20

Sent = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Copied:
    """A file that lies in the destination, proven equal to the source. `sent` counts the bytes that went over."""

    entry: Entry
    crc64nvme: str
    sent: int
    proven_by: str


class _Damaged(StoreError):
    """Other bytes arrived than were sent, or were received than the source holds: nothing of it is to be gone on with."""


class Copier:
    """Copies files with a bounded number of threads and buffers. Use as a context manager."""

    def __init__(
        self, source: Store, destination: Store, threads: int = THREADS, progress: Sent | None = None
    ) -> None:
        if not isinstance(destination, Receiving):
            raise StoreError(f"{destination.url}: this kind of store takes no files")
        self.source, self.destination = source, destination
        self._receiver: Receiving = destination
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ckptguard-copy")
        self._buffers = threading.local()
        self._threads = threads
        self._progress = progress or (lambda count: None)

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def copy(self, key: str, to: str, *, replace: Entry | None = None) -> Copied:
        """Copy one file; `to` must be free, or still be what `replace` says.

        Raises Refused when somebody else wrote `to` meanwhile, StoreError when either side fails, when the source
        changed, or when what arrived differs. An upload that was broken off is gone on with the next time.
        """
        before = self.source.stat(key)
        upload = self._receiver.receive(to, before.size, _name_source(before), replace=replace)
        try:
            parts, sent = self._send(upload, key, before.size)
            if self.source.stat(key).identity != before.identity:
                upload.abort()
                raise StoreError(f"{key}: changed while it was copied", "repeat when the save is done")
            crc = encode(join((decode(p.crc64nvme or ""), p.size) for _, p in sorted(parts.items())))
            witness = self._source_proof(key, crc, before.size)
            entry = self._finish(upload, parts, crc, key, to)
        except _Damaged:
            upload.abort()
            raise
        finally:
            upload.close()
        try:
            by = self.prove(key, to, crc)
            if witness is not None:
                agrees = compare(self.destination, to, witness, self._pool).answer is not Answer.DIFFERENT
                self._must(agrees, to, "the source's own checksum")
        except _Damaged:
            self._take_back(entry)
            raise
        return Copied(entry, crc, sent, by)

    def _take_back(self, entry: Entry) -> None:
        """Remove what arrived damaged, unless somebody else has replaced it meanwhile."""
        if (
            isinstance(self.destination, WritableStore)
            and self.destination.stat(entry.key).identity == entry.identity
        ):
            self.destination.delete(entry.key)

    def _send(self, upload: Upload, key: str, size: int) -> tuple[dict[int, PartReceipt], int]:
        """Send the parts that are not there yet, a few at a time."""
        had, parts, sent = dict(upload.received()), {}, 0
        pending: set[Future[tuple[PartReceipt, int]]] = set()
        try:
            for number, start, length in _cut(size, upload.part_size):
                if len(pending) >= self._threads:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for receipt, count in (f.result() for f in done):
                        parts[receipt.number], sent = receipt, sent + count
                pending.add(
                    self._pool.submit(self._part, upload, key, number, start, length, had.get(number))
                )
            for receipt, count in (f.result() for f in pending):
                parts[receipt.number], sent = receipt, sent + count
        except BaseException:
            for future in pending:
                future.cancel()
            wait(pending)
            raise
        return parts, sent

    def _part(
        self, upload: Upload, key: str, number: int, start: int, length: int, had: PartReceipt | None
    ) -> tuple[PartReceipt, int]:
        if had is not None and had.size == length and upload.journaled:
            self._progress(length)
            return had, 0
        data = self._buffer(upload.part_size)[:length]
        self.source.readinto(key, start, data)
        if (
            had is not None
            and had.size == length
            and had.md5 == hashlib.md5(data, usedforsecurity=False).hexdigest()
        ):
            receipt, count = PartReceipt(number, length, had.tag, had.md5, crc64(data)), 0
        else:
            receipt, count = upload.send(number, data), length
        self._progress(length)
        return receipt, count

    def _buffer(self, size: int) -> memoryview:
        held: memoryview | None = getattr(self._buffers, "held", None)
        if held is None or len(held) < size:
            held = self._buffers.held = memoryview(bytearray(size))
        return held

    def _finish(self, upload: Upload, parts: dict[int, PartReceipt], crc: str, key: str, to: str) -> Entry:
        try:
            return upload.finish(parts, crc)
        except StoreError as error:
            # Another replicator may have completed the very same object, and with it this upload.
            return self._same_already(key, to, error)
        except Refused as error:
            return self._same_already(key, to, error)

    def _same_already(self, key: str, to: str, error: StoreError | Refused) -> Entry:
        try:
            if self.same(key, to):
                return self.destination.stat(to)
        except KeyNotFound:
            pass
        raise error

    # --- proof --------------------------------------------------------------------------------------

    def _source_proof(self, key: str, crc: str, size: int) -> Proof | None:
        """Make sure that the bytes that were read are those that the source vouches for, before they become visible.

        Returns the source's proof where it can only be compared with the file that has arrived on a disk. A source that
        vouches for nothing, a disk, was read once and is believed: it was audited before.
        """
        if not isinstance(self.source, Proving):
            return None
        proof = self.source.proof(key)
        stated = {c.algorithm: c.value for c in proof.checksums if not c.composite}
        if "crc64nvme" not in stated:
            if self.destination.traits.local and choose(proof) is not None:
                return proof
            stated = {
                "crc64nvme": encode(crc64_of(self.source.fresh(key) or self.source, key, size, self._pool))
            }
        if stated["crc64nvme"] != crc:
            raise _Damaged(
                f"{self.source.url}/{key}: other bytes were received than the store has",
                "repeat; if it happens again, test the memory and the network of this machine",
            )
        return None

    def prove(self, key: str, to: str, crc: str) -> str:
        """Prove that `to` holds what was read of `key`, of CRC64NVME `crc`, and say by what. Raises StoreError."""
        store = self.destination
        if isinstance(store, Proving):
            proof = store.proof(to)
            stated = {c.algorithm: c.value for c in proof.checksums if not c.composite}
            if "crc64nvme" in stated:
                return self._must(stated["crc64nvme"] == crc, to, "the store's CRC64NVME")
            if self.source.traits.local:
                found = compare(self.source, key, proof, self._pool)
                if found.answer is not Answer.UNKNOWN:
                    return self._must(found.answer is Answer.SAME, to, f"the store's {found.by}")
        # Past the cache, where that is possible: what was written is wanted, not what was meant to be written.
        fresh = store.fresh(to) or store
        read_back = encode(crc64_of(fresh, to, store.stat(to).size, self._pool))
        return self._must(read_back == crc, to, "reading it back")

    def _must(self, same: bool, to: str, by: str) -> str:
        if not same:
            raise _Damaged(
                f"{self.destination.url}/{to}: arrived with other bytes than were sent ({by})",
                "repeat; if it happens again, test the memory and the network of this machine",
            )
        return by

    def checksum(self, to: str) -> str:
        """The CRC64NVME of a file of the destination: as the store states it, else by reading it. Raises StoreError."""
        store = self.destination
        if isinstance(store, Proving):
            for checksum in store.proof(to).checksums:
                if checksum.algorithm == "crc64nvme" and not checksum.composite:
                    return checksum.value
        return encode(crc64_of(store, to, store.stat(to).size, self._pool))

    def same(self, key: str, to: str) -> bool:
        """Whether two existing files are equal: by the checksums of either store, else byte by byte. Raises StoreError."""
        for near, near_key, far, far_key in (
            (self.source, key, self.destination, to),
            (self.destination, to, self.source, key),
        ):
            if near.traits.local and isinstance(far, Proving):
                outcome = compare(near, near_key, far.proof(far_key), self._pool)
                if outcome.answer is not Answer.UNKNOWN:
                    return outcome.answer is Answer.SAME
        if isinstance(self.source, Proving) and isinstance(self.destination, Proving):
            shared = shared_checksum(self.source.proof(key), self.destination.proof(to))
            if shared is not None:
                return shared.answer is Answer.SAME
        size = self.source.stat(key).size
        if size != self.destination.stat(to).size:
            return False
        return next(differing_blocks(self.source, key, self.destination, to, size, self._pool), None) is None


def differing_blocks(
    one: Store,
    key: str,
    other: Store,
    other_key: str,
    size: int,
    pool: ThreadPoolExecutor,
    block: int = BLOCK,
) -> Iterator[tuple[int, int]]:
    """(start, length) of every block in which two files of the same size differ, in order, read side by side."""

    def differs(start: int) -> bool:
        length = min(block, size - start)
        return one.read(key, start, length) != other.read(other_key, start, length)

    width = 2 * THREADS
    for begin in range(0, size, block * width):
        starts = range(begin, min(size, begin + block * width), block)
        for start, different in zip(starts, pool.map(differs, starts), strict=True):
            if different:
                yield start, min(block, size - start)


def shared_checksum(one: Proof, other: Proof) -> Comparison | None:
    """Two objects compared by a checksum of the whole that both stores keep; None where they share none."""
    if one.entry.size != other.entry.size:
        return Comparison(Answer.DIFFERENT, "size", str(other.entry.size), str(one.entry.size))
    values = {c.algorithm: c.value for c in one.checksums if not c.composite}
    for stated in other.checksums:
        if not stated.composite and stated.algorithm in values:
            mine = values[stated.algorithm]
            answer = Answer.SAME if mine == stated.value else Answer.DIFFERENT
            return Comparison(answer, f"{stated.algorithm.upper()} of both stores", stated.value, mine)
    return None


def _cut(size: int, part: int) -> Iterator[tuple[int, int, int]]:
    """(number, start, length) of each part; an empty file is one empty part."""
    for number, start in enumerate(range(0, max(size, 1), part), 1):
        yield number, start, min(part, size - start)


def _name_source(entry: Entry) -> str:
    """Names the bytes of a source, so that only parts of the very same are gone on with."""
    return f"{entry.key} {entry.size} {entry.modified} {entry.etag or ''}"

"""Finds out what of a checkpoint is damaged and which ranges of its copy would heal it. Changes nothing.

What is damaged is found by the seal, or, where there is none, by the checksums of the replica's store and then byte for
byte. `ckptguard.mending` carries a plan out.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from ckptguard.errors import Refused
from ckptguard.model import Entry, Evidence, Manifest
from ckptguard.ports import Store
from ckptguard.replica_look import compare_files
from ckptguard.seals import Seal, SealedFile
from ckptguard.storage.checksums import Answer
from ckptguard.storage.transfer import differing_blocks

PIECE = 8 << 20
THREADS = 4

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """What one file needs: `ranges` (start, length) to fetch, and the size and time that it must have then."""

    name: str
    key: str
    size: int
    modified: float | None
    ranges: tuple[Range, ...]
    sealed: SealedFile | None = None
    block: int = PIECE
    present: int | None = None

    @property
    def sound(self) -> bool:
        return not self.ranges and self.present == self.size

    @property
    def fetched(self) -> int:
        return sum(length for _, length in self.ranges)


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What a checkpoint needs. `by` says how the damage was found: "seal", or "replica"."""

    path: str
    by: str
    files: tuple[FilePlan, ...]

    @property
    def damaged(self) -> tuple[FilePlan, ...]:
        return tuple(f for f in self.files if not f.sound)

    @property
    def fetched(self) -> int:
        return sum(f.fetched for f in self.files)


# --- finding the damage -------------------------------------------------------------------------------


def plan_repair(
    store: Store, manifest: Manifest | None, path: str, replica: Store, copy: Manifest, seal: Seal | None
) -> RepairPlan:
    """Find out what is damaged. `manifest` is None where nothing of the checkpoint is left. A `seal` that is given counts.

    Raises StoreError when a side cannot be read, Refused when the replica is not of the same save.
    """
    here = {f.name: f.entry for f in manifest.files} if manifest else {}
    there = {f.name: f.entry for f in copy.files}
    with ThreadPoolExecutor(THREADS, thread_name_prefix="ckptguard-repair") as pool:
        if seal is not None and seal.files:
            files = [
                _by_seal(store, here.get(n), replica, there.get(n), n, s, seal.block_size, pool)
                for n, s in sorted(seal.files.items())
            ]
            return RepairPlan(path, "seal", tuple(files))
        unknown = sorted(set(here) - set(there))
        if unknown:
            raise Refused(
                f"{path}: {', '.join(unknown[:3])} is not on {replica.url}: that is no copy of the same save",
                "name the replica of this very checkpoint",
            )
        return RepairPlan(
            path,
            "replica",
            tuple(_by_replica(store, here.get(n), replica, e, n, pool) for n, e in sorted(there.items())),
        )


def _by_seal(
    store: Store,
    entry: Entry | None,
    replica: Store,
    copy: Entry | None,
    name: str,
    sealed: SealedFile,
    block: int,
    pool: ThreadPoolExecutor,
) -> FilePlan:
    key = (copy or entry or Entry(name, 0, 0.0)).key
    size = 0 if entry is None else entry.size
    starts = range(0, sealed.size, block)

    def bad(index: int) -> bool:
        start = index * block
        length = min(block, sealed.size - start)
        if start + length > size:
            return True
        expected = sealed.blocks[index]
        fresh = store.fresh(key) or store
        # Read again, past the cache, before it is called damaged.
        return (
            block_digest(store, key, start, length) != expected
            and block_digest(fresh, key, start, length) != expected
        )

    wrong = [start for start, is_bad in zip(starts, pool.map(bad, range(len(starts))), strict=True) if is_bad]
    ranges = tuple(_joined([(start, min(block, sealed.size - start)) for start in wrong]))
    if (ranges or (entry is None)) and (copy is None or copy.size != sealed.size):
        found = "missing" if copy is None else f"{copy.size} bytes"
        raise Refused(
            f"{name}: damaged here, and {found} on {replica.url} where {sealed.size} bytes were sealed",
            "name another replica",
        )
    present = None if entry is None else entry.size
    return FilePlan(name, key, sealed.size, sealed.modified, ranges, sealed, block, present)


def _by_replica(
    store: Store, entry: Entry | None, replica: Store, copy: Entry, name: str, pool: ThreadPoolExecutor
) -> FilePlan:
    if entry is None:
        whole = ((0, copy.size),) if copy.size else ()
        return FilePlan(name, copy.key, copy.size, None, whole)
    common = min(entry.size, copy.size)
    ranges: list[Range] = []
    same = False
    if entry.size == copy.size:
        found = compare_files(store, replica, copy.key, copy.size, Evidence.CONTENT, pool)
        same = found is not None and found.answer is Answer.SAME
    if not same:
        ranges = list(differing_blocks(store, copy.key, replica, copy.key, common, pool))
    if copy.size > common:
        ranges.append((common, copy.size - common))
    return FilePlan(name, copy.key, copy.size, entry.modified, tuple(_joined(ranges)), present=entry.size)


def _joined(ranges: list[Range]) -> Iterator[Range]:
    """Neighbouring ranges as one."""
    begin, end = -1, -1
    for start, length in ranges:
        if start != end and end > begin:
            yield begin, end - begin
            begin = start
        elif begin < 0:
            begin = start
        end = start + length
    if end > begin:
        yield begin, end - begin


def block_digest(store: Store, key: str, start: int, length: int) -> str:
    """The digest of a stretch of a file, as seals have it."""
    return xxhash.xxh3_128_hexdigest(store.read(key, start, length))

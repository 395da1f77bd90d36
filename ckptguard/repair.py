"""Heals a damaged checkpoint on disk from a copy of it: only the damaged ranges are fetched.

What is damaged is found by the seal, or, where there is none, by the checksums of the replica's store and then byte for
byte. The repaired checkpoint is built below `.ckptguard/repair/`, verified whole, and exchanged with the damaged one, which
is kept below `.ckptguard/damaged/`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ckptguard.errors import KeyNotFound, Refused, StoreError
from ckptguard.model import Entry, Evidence, Manifest
from ckptguard.ports import Store
from ckptguard.replica_look import compare_files
from ckptguard.replicate import enough_space
from ckptguard.seals import Seal, SealedFile
from ckptguard.storage.checksums import Answer
from ckptguard.storage.local import LocalStore
from ckptguard.storage.transfer import differing_blocks

OURS = ".ckptguard"
BUILDING = f"{OURS}/repair"
KEPT = f"{OURS}/damaged"
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
            _digest(store, key, start, length) != expected and _digest(fresh, key, start, length) != expected
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


def _digest(store: Store, key: str, start: int, length: int) -> str:
    return xxhash.xxh3_128_hexdigest(store.read(key, start, length))


# --- healing ------------------------------------------------------------------------------------------


def apply_repair(
    store: LocalStore, plan: RepairPlan, replica: Store, before: Mapping[str, Entry], stamp: str
) -> tuple[str, ...]:
    """Build the repaired checkpoint, verify it whole, exchange it; returns where what was damaged is kept now.

    `before` is the listing that the plan was made from, by name. Raises Refused when the checkpoint changed since,
    or when the replica does not hold what is needed, StoreError when a side fails; the checkpoint is as it was then.
    """
    root = store.root
    with _alone(root, plan.path):
        wanted = {path: files for path, files in _units(plan).items() if not all(f.sound for f in files)}
        for path in wanted:
            _leftovers(root, path, stamp)
        enough_space(root, sum(f.size for f in plan.damaged))
        buildings = {path: root / BUILDING / f"{path}.building" for path in wanted}
        try:
            try:
                for path, files in wanted.items():
                    _build_unit(root, path, files, buildings[path], replica)
            finally:
                # Said first: what changed meanwhile explains whatever else went wrong.
                _unchanged(store, before)
        except BaseException:
            for building in buildings.values():
                _remove(building)
            raise
        kept = [_exchange(root, path, building, stamp) for path, building in buildings.items()]
    store.forget()
    return tuple(k for k in kept if k is not None)


def _units(plan: RepairPlan) -> dict[str, list[FilePlan]]:
    """What is exchanged in one step each: the checkpoint's folder, or a file that lies beside others of its save."""
    units: dict[str, list[FilePlan]] = {}
    for file in plan.files:
        units.setdefault(plan.path if file.key.startswith(f"{plan.path}/") else file.key, []).append(file)
    return units


def _build_unit(root: Path, path: str, files: list[FilePlan], building: Path, replica: Store) -> None:
    """Build one folder or file beside, and verify every file of it."""
    targets = {f.name: building / f.key[len(path) + 1 :] if f.key != path else building for f in files}
    for file in files:
        _build(root, file, targets[file.name], replica)
    _carry_the_rest(root / path, building, {root / f.key for f in files})
    for file in files:
        _verify(LocalStore(building.parent), building.parent, targets[file.name], file, replica)


def _build(root: Path, file: FilePlan, target: Path, replica: Store) -> None:
    """A sound file is linked: its bytes are not written to. A damaged one is copied and mended in the copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    original = root / file.key
    if file.sound:
        if not original.is_symlink():
            _link(original, target)
        return
    if file.present is not None:
        shutil.copyfile(original, target)
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, file.size)
        for start, length in file.ranges:
            for at in range(start, start + length, PIECE):
                data = replica.read(file.key, at, min(PIECE, start + length - at))
                os.pwrite(fd, data, at)
        os.fsync(fd)
    finally:
        os.close(fd)
    if file.present is not None:
        shutil.copymode(original, target)
    # The time is part of what a seal knows a file by, and trainers rotate by it.
    if file.modified is not None:
        os.utime(target, (file.modified, file.modified))


def _carry_the_rest(original: Path, building: Path, planned: set[Path]) -> None:
    """Files that neither seal nor replica know stay with the checkpoint; folders keep their times."""
    if not original.is_dir():
        return
    for path in sorted(original.rglob("*")):
        to = building / path.relative_to(original)
        if path.is_symlink():
            if not to.is_symlink() and not to.exists():
                to.parent.mkdir(parents=True, exist_ok=True)
                to.symlink_to(path.readlink())
        elif path.is_dir():
            to.mkdir(parents=True, exist_ok=True)
        elif path not in planned and not to.exists():
            _link(path, to)
    for path in (p for p in sorted(original.rglob("*"), reverse=True) if p.is_dir() and not p.is_symlink()):
        shutil.copystat(path, building / path.relative_to(original))
    shutil.copystat(original, building)


def _link(original: Path, to: Path) -> None:
    try:
        os.link(original, to)
    except OSError:
        # Another volume below a linked folder, or a file system without links.
        shutil.copy2(original, to)


def _verify(store: LocalStore, root: Path, target: Path, file: FilePlan, replica: Store) -> None:
    """The whole file, read back: against its seal, or against the replica."""
    if target.is_symlink():
        return
    key = target.relative_to(root).as_posix()
    fresh = store.fresh(key) or store
    if file.sealed is not None:
        for index, start in enumerate(range(0, file.size, file.block)):
            length = min(file.block, file.size - start)
            if _digest(fresh, key, start, length) != file.sealed.blocks[index]:
                raise Refused(
                    f"{file.name}: bytes {start}-{start + length - 1} from {replica.url} are not what was sealed either",
                    "name another replica",
                )
        return
    if file.sound:
        return
    with ThreadPoolExecutor(THREADS) as pool:
        for start, length in differing_blocks(fresh, key, replica, file.key, file.size, pool):
            raise StoreError(
                f"{file.name}: bytes {start}-{start + length - 1} differ from the replica after the repair",
                "repeat",
            )


def _unchanged(store: LocalStore, before: Mapping[str, Entry]) -> None:
    for entry in before.values():
        try:
            now = store.stat(entry.key)
        except KeyNotFound:
            raise Refused(f"{entry.key}: gone meanwhile", "is the training running?") from None
        if now.identity != entry.identity:
            raise Refused(
                f"{entry.key}: changed while it was repaired; it was left as it is",
                "repeat when the save is done",
            )


# --- swapping -----------------------------------------------------------------------------------------


def _exchange(root: Path, path: str, building: Path, stamp: str) -> str | None:
    """Put the repaired checkpoint in place, in one step where something lies there, and keep what lay there."""
    final, ready = root / path, root / BUILDING / path
    building.rename(ready)
    if not final.exists():
        final.parent.mkdir(parents=True, exist_ok=True)
        ready.rename(final)
        return None
    kept = root / KEPT / f"{path}-{stamp}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    if _swap(ready, final):
        ready.rename(kept)
    else:
        final.rename(kept)
        ready.rename(final)
    return kept.relative_to(root).as_posix()


def _swap(one: Path, other: Path) -> bool:
    """Exchange two names atomically; False where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2
    if rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise StoreError(f"{other}: cannot be exchanged: {os.strerror(ctypes.get_errno())}", "check permissions")


def _leftovers(root: Path, path: str, stamp: str) -> None:
    """What a killed repair left: an unfinished build is removed; a whole checkpoint may be the damaged one, and is kept."""
    _remove(root / BUILDING / f"{path}.building")
    ready = root / BUILDING / path
    if ready.exists():
        kept = root / KEPT / f"{path}-{stamp}-left"
        kept.parent.mkdir(parents=True, exist_ok=True)
        ready.rename(kept)


def drop_damaged(root: Path, path: str) -> list[str]:
    """Remove the damaged copies that earlier repairs kept of a checkpoint; returns their names."""
    parent = (root / KEPT / path).parent
    kept = sorted(parent.glob(f"{Path(path).name}-*")) if parent.is_dir() else []
    for each in kept:
        _remove(each)
    return [each.relative_to(root).as_posix() for each in kept]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _alone(root: Path, path: str) -> Iterator[None]:
    """Only one repair of a checkpoint at a time."""
    lock = root / BUILDING / f"{path}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refused(f"{path}: another repair of it is running", "wait until it has finished") from None
        yield

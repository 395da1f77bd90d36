"""Builds a repaired checkpoint beside the damaged one, verifies it whole, and exchanges the two in one step.

It is built below `.ckptguard/repair/`; the damaged one is kept below `.ckptguard/damaged/`. At any moment either the damaged or
the repaired checkpoint lies in its place, whole, also when the process is killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckptguard.arriving import alone, enough_space
from ckptguard.errors import KeyNotFound, Refused, StoreError
from ckptguard.model import Entry
from ckptguard.ports import Store
from ckptguard.repair import PIECE, THREADS, FilePlan, RepairPlan, block_digest
from ckptguard.storage.local import LocalStore
from ckptguard.storage.transfer import differing_blocks

OURS = ".ckptguard"
BUILDING = f"{OURS}/repair"
KEPT = f"{OURS}/damaged"


def apply_repair(
    store: LocalStore, plan: RepairPlan, replica: Store, before: Mapping[str, Entry], stamp: str
) -> tuple[str, ...]:
    """Build the repaired checkpoint, verify it whole, exchange it; returns where what was damaged is kept now.

    `before` is the listing that the plan was made from, by name. Raises Refused when the checkpoint changed since,
    or when the replica does not hold what is needed, StoreError when a side fails; the checkpoint is as it was then.
    """
    root = store.root
    with alone(root / BUILDING / f"{plan.path}.lock", plan.path):
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
            if block_digest(fresh, key, start, length) != file.sealed.blocks[index]:
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

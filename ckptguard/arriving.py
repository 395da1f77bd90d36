"""What arrives when a checkpoint is copied: one file at a time, each proven, none over other bytes unasked."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptguard import units
from ckptguard.errors import KeyNotFound, Refused
from ckptguard.model import Entry
from ckptguard.storage.transfer import Copier

FILES_AT_ONCE = 4
THERE_ALREADY = "the same bytes were there already"

Progress = Callable[[str, int], None]
"""Called with a file's name and size when it has arrived."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """One file in the destination: its entry there, its checksum, how it was proven, how many bytes were sent."""

    name: str
    entry: Entry
    crc64nvme: str
    proven_by: str
    sent: int


def bring(copier: Copier, key: str, to: str, name: str, overwrite: bool) -> Arrived:
    """Bring one file to where it is not yet. Raises Refused where other bytes lie and `overwrite` is not set."""
    try:
        there: Entry | None = copier.destination.stat(to)
    except KeyNotFound:
        there = None
    if there is not None:
        if copier.same(key, to):
            return Arrived(name, there, copier.checksum(to), THERE_ALREADY, 0)
        if not overwrite:
            raise Refused(
                f"{copier.destination.url}/{to}: other bytes lie there already ({there.size} bytes); they were left as they are",
                "compare both: ckptguard audit RUN --replica REPLICA; --overwrite replaces them",
            )
    copied = copier.copy(key, to, replace=there)
    return Arrived(name, copied.entry, copied.crc64nvme, copied.proven_by, copied.sent)


def enough_space(folder: Path, needed: int) -> None:
    """Raise Refused where less is free than is needed, with a margin for what others write meanwhile."""
    here = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(here).free
    margin = min(needed // 20, 1 << 30) + (1 << 20)
    if free < needed + margin:
        raise Refused(
            f"{folder}: {units.size(needed)} are needed and {units.size(free)} are free",
            "make room, or choose a folder on another volume",
        )


@contextmanager
def alone(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock file for the block; it is let go of when the process ends, however that ends. Raises Refused."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refused(f"{what}: another process is at work on it", "wait until it has finished") from None
        yield

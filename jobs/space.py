"""Free space where a run really saves to: through symbolic links, on the mount that they lead to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def room(target: str, newest: Iterable[str] = ()) -> tuple[int | None, int | None]:
    """(free bytes, free inodes) for the next saves, the least of all places where checkpoints of the run lie.

    A linked checkpoint lies on another file system than its run. None where a file system does not say.
    """
    places = {_real(Path(target) / path) for path in newest} | {_real(Path(target))}
    free_bytes: list[int] = []
    free_inodes: list[int] = []
    for place in places:
        try:
            info = os.statvfs(place)
        except OSError:
            continue
        free_bytes.append(info.f_bavail * info.f_frsize)
        if info.f_files:
            free_inodes.append(info.f_favail)
    return min(free_bytes, default=None), min(free_inodes, default=None)


def _real(path: Path) -> Path:
    """The folder that a path's bytes lie in, however it is linked; the nearest one that exists."""
    real = path.resolve()
    while not real.is_dir() and real != real.parent:
        real = real.parent
    return real

"""Whether a process of this machine still holds a file open for writing: then its save goes on, however still it lies."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_WRITES = os.O_WRONLY | os.O_RDWR


def any_written(paths: Iterable[Path], processes: Path = Path("/proc")) -> bool:
    """Whether any of the files is open for writing, as far as this user may see. Other machines' processes are not seen."""
    wanted = {os.path.realpath(path) for path in paths}
    for descriptor in processes.glob("[0-9]*/fd/*"):
        try:
            if str(descriptor.readlink()) in wanted and _writes(descriptor):
                return True
        except OSError:
            continue  # it ended, or is somebody else's
    return False


def _writes(descriptor: Path) -> bool:
    """Whether a descriptor is open for writing, by the flags that the kernel tells in octal."""
    info = (descriptor.parent.parent / "fdinfo" / descriptor.name).read_text(encoding="ascii")
    flags = next((line.split()[1] for line in info.splitlines() if line.startswith("flags:")), "0")
    return bool(int(flags, 8) & _WRITES)

"""Makes this process step back behind a training on the same machine. Linux; elsewhere only the processor is left to others."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress

NICE = 10
_CALLS = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_WHO_PROCESS, _CLASS_IDLE, _CLASS_SHIFT = 1, 3, 13


def step_back() -> None:
    """Processor time and disk only where nobody else wants them. Threads that are started after this call inherit it.

    Never fails: a kernel or container that does not allow it leaves things as they are.
    """
    with suppress(OSError):
        os.nice(NICE)
    call = _CALLS.get(platform.machine())
    if sys.platform == "linux" and call is not None:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(call, _WHO_PROCESS, 0, _CLASS_IDLE << _CLASS_SHIFT)


def io_class() -> int | None:
    """The I/O scheduling class of this thread (3: idle), or None where it cannot be asked."""
    call = {n: c + 1 for n, c in _CALLS.items()}.get(platform.machine())
    if sys.platform != "linux" or call is None:
        return None
    value = ctypes.CDLL(None).syscall(call, _WHO_PROCESS, 0)
    return None if value < 0 else int(value) >> _CLASS_SHIFT

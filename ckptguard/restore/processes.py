"""Runs a process with all that it starts under limits of time and memory, and leaves nothing of it behind.

Memory is what the processes really hold: a limit on address space would refuse torch, which reserves far more than it uses.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ckptguard.errors import OutOfMemory, TimedOut
from ckptguard.restore.model import Limits
from ckptguard.units import duration, size

POLL = 0.05
TREE_EVERY = 0.5
"""Seconds between looks at all processes of the machine, of which there may be thousands."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Ended:
    """`status` as the process gave it (negative: killed by that signal); None where we stopped it as asked by `until`."""

    status: int | None
    seconds: float
    peak: int


def run(
    command: Sequence[str],
    limits: Limits,
    *,
    output: IO[bytes],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    until: Callable[[], bool] = lambda: False,
    look_every: float = POLL,
) -> Ended:
    """Run a command to its end, or until `until()` holds. Raises TimedOut, OutOfMemory; kills the whole tree either way."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=env,
        cwd=cwd,
        start_new_session=True,
    )
    members = {process.pid}
    known = stamps(members)
    peak = 0
    looked = counted = began
    try:
        while process.poll() is None:
            now = time.monotonic()
            if limits.timeout is not None and now - began > limits.timeout:
                raise TimedOut(
                    f"the child process was not done after {duration(limits.timeout)}",
                    "give it more with --timeout, or replay fewer --steps",
                )
            if now - counted >= TREE_EVERY:
                counted = now
                members = tree_of(process.pid)
                known |= stamps(members - known.keys())
            held = memory_of(members, beyond=limits.max_memory)
            peak = max(peak, held)
            if limits.max_memory is not None and held > limits.max_memory:
                raise OutOfMemory(
                    f"the child process held {size(held)}, more than the allowed {size(limits.max_memory)}",
                    "give it more with --max-memory",
                )
            if now - looked >= look_every:
                looked = now
                if until():
                    return Ended(None, now - began, peak)
            time.sleep(POLL)
        return Ended(process.returncode, time.monotonic() - began, peak)
    finally:
        end_tree(process, known, limits.grace)


def stamps(pids: Iterable[int]) -> dict[int, str]:
    """When each process began, which with its number names it: numbers are given out again."""
    return {pid: stamp for pid in pids if (stamp := _start_time(pid))}


def end_tree(process: subprocess.Popen[bytes], known: Mapping[int, str], grace: float) -> None:
    """Ask every process of the tree to stop, then kill what is left. Only processes that this one started are touched."""
    started = {**stamps(tree_of(process.pid)), **known}
    if process.poll() is None or _alive(started):
        _signal_all(process, started, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and (process.poll() is None or _alive(started)):
            time.sleep(POLL)
        _signal_all(process, started, signal.SIGKILL)
    process.wait()


def _signal_all(process: subprocess.Popen[bytes], started: Mapping[int, str], number: int) -> None:
    if process.poll() is None:
        _signal(lambda: os.killpg(process.pid, number))  # it leads its own group
    for pid in _alive(started):
        _signal(lambda pid=pid: os.kill(pid, number))  # type: ignore[misc]


def _signal(send: Callable[[], None]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send()


def _alive(started: Mapping[int, str]) -> list[int]:
    """Those that still are the processes they were: a number may have been given to another process meanwhile."""
    return [pid for pid, stamp in started.items() if _start_time(pid) == stamp]


# --- what the kernel says of processes --------------------------------------------------------------------


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, [] when there is no such process (or no /proc)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    fields = text.rpartition(")")[2].split()
    return [] if not fields or fields[0] in ("Z", "X") else fields


def _start_time(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else ""


def tree_of(root: int) -> set[int]:
    """The process, everything that descends from it, and everything in its session (an orphan has another parent)."""
    parents: dict[int, int] = {}
    sessions: dict[int, int] = {}
    try:
        names = [path.name for path in Path("/proc").iterdir()]
    except OSError:
        return {root}
    for name in names:
        fields = _stat(int(name)) if name.isdecimal() else []
        if len(fields) > 3:
            parents[int(name)], sessions[int(name)] = int(fields[1]), int(fields[3])
    found = {pid for pid, session in sessions.items() if session == root or pid == root}
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return found


def memory_of(pids: set[int], beyond: int | None = None) -> int:
    """Bytes of memory that the processes hold. What they share counts once, if the plain sum is above `beyond`."""
    total = sum(_resident(pid) for pid in pids)
    if beyond is not None and total > beyond and len(pids) > 1:
        return sum(_proportional(pid) for pid in pids)
    return total


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def _proportional(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    return _resident(pid)

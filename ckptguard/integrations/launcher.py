"""Runs a command as if it had been started directly: its exit status, its signals, its terminal.

Not by exec: as the first process of a container a program gets no default signal handling and must collect the
processes that its children leave behind, which no training script does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

NOT_FOUND, NOT_EXECUTABLE = 127, 126
SIGNAL_BASE = 128
_PR_SET_PDEATHSIG = 1
# What the kernel sends us about ourselves, what cannot be caught, and what the terminal sends to the command's own
# process group is not passed on.
_OWN = {
    signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
    signal.SIGSYS, signal.SIGTRAP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGPIPE, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF,
}  # fmt: skip
FORWARDED = frozenset(signal.valid_signals()) - frozenset(_OWN)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """While the gate looks, a signal ends it with 128+N, also as the first process of a container.

    There the kernel drops signals without a handler, and a node that is being taken away would wait for its limit.
    """

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(SIGNAL_BASE + number)

    before = {number: signal.signal(number, end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(command: Sequence[str], environment: Mapping[str, str], *, stdout_to_stderr: bool = False) -> int:
    """Run a command to its end and return its exit status: 128+N for signal N, 127 and 126 where it cannot be started.

    It gets a process group of its own, and the terminal where we have it. Signals sent to us reach the command itself and
    not its children, as if it stood in our place: a data loader must not die of a signal that the training handles.
    """
    watched: set[signal.Signals | int] = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    terminal = _terminal()
    try:
        child = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdout=sys.stderr if stdout_to_stderr else None,
            process_group=0,
            preexec_fn=_prepared(before, terminal),
        )
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        print(f"ckptguard: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return NOT_EXECUTABLE if isinstance(error, PermissionError) else NOT_FOUND
    try:
        status = _follow(child.pid, watched, terminal)
        child.returncode = status
        return status
    finally:
        _give_terminal(terminal, os.getpgrp())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepared(mask: set[signal.Signals | int], terminal: int | None) -> Callable[[], None]:
    """What the child does before it becomes the command: the terminal taken, our signal mask undone, its end tied to ours.

    A launcher that was killed by force must not leave a training behind that the scheduler then starts a second time.
    """
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()
    death = int(signal.SIGTERM)

    def prepare() -> None:
        _give_terminal(terminal, os.getpgrp())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_PDEATHSIG, death, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(SIGNAL_BASE + death)

    return prepare


def _follow(pid: int, watched: set[signal.Signals | int], terminal: int | None) -> int:
    """Pass signals on until the command has ended; collect whatever other processes were left to us."""
    while True:
        status = _collect(pid, terminal)
        if status is not None:
            return status
        received = signal.sigwaitinfo(watched)
        if received.si_signo != signal.SIGCHLD:
            with suppress(ProcessLookupError):
                os.kill(pid, received.si_signo)


def _collect(pid: int, terminal: int | None) -> int | None:
    """The command's exit status once it has ended. Where Ctrl-Z stopped it, we stop with it, for the shell to see."""
    found = None
    while True:
        try:
            gone, status = os.waitpid(-1, os.WNOHANG | (os.WUNTRACED if terminal is not None else 0))
        except ChildProcessError:
            return found
        if gone == 0:
            return found
        if gone != pid:
            continue
        if os.WIFSTOPPED(status):
            _give_terminal(terminal, os.getpgrp())
            os.kill(os.getpid(), signal.SIGSTOP)
            _give_terminal(terminal, pid)
            os.killpg(pid, signal.SIGCONT)
            continue
        code = os.waitstatus_to_exitcode(status)
        found = SIGNAL_BASE - code if code < 0 else code


def _terminal() -> int | None:
    """Our controlling terminal, where we are in its foreground."""
    try:
        return 0 if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp() else None
    except OSError:
        return None


def _give_terminal(terminal: int | None, group: int) -> None:
    """Put a process group into the foreground; whoever does it from the background would be stopped for that."""
    if terminal is None:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        with suppress(OSError):
            os.tcsetpgrp(terminal, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

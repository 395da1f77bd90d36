"""Options and progress that audit and preflight share."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckptguard.errors import UsageError
from ckptguard.facts import Progress
from ckptguard.model import Evidence


def depth_of(text: str, option: str = "--depth") -> Evidence:
    """The evidence level of an option. Raises UsageError naming what it can be."""
    try:
        return Evidence(text)
    except ValueError:
        raise UsageError(f"{option} {text}: expected one of {', '.join(Evidence)}") from None


@contextmanager
def progress(label: str, *, quiet: bool) -> Iterator[Progress | None]:
    """A progress line on stderr for long work, on a terminal only; a line a minute elsewhere."""
    if quiet:
        yield None
        return
    lock = threading.Lock()
    state = {"bytes": 0, "begin": time.monotonic(), "shown": 0.0}
    terminal = sys.stderr.isatty()

    def show(name: str, count: int) -> None:
        with lock:
            state["bytes"] += count
            now = time.monotonic()
            if now - state["begin"] < 1.0 or now - state["shown"] < (0.2 if terminal else 60.0):
                return
            state["shown"] = now
            rate = state["bytes"] / (now - state["begin"])
            line = f"{label}: {state['bytes'] / 1e9:.2f} GB read, {rate / 1e9:.2f} GB/s, {name}"
            print(
                f"\r\x1b[K{line[:110]}" if terminal else line,
                end="" if terminal else "\n",
                file=sys.stderr,
                flush=True,
            )

    yield show
    if terminal and state["shown"]:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)

"""The service's end of the reading processes: asks, follows the progress, and ends one that was cancelled or hangs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckptguard.errors import (
    CkptguardError,
    NothingRecognised,
    OutOfMemory,
    StoreDenied,
    StoreError,
    TargetNotFound,
    TimedOut,
)

REQUESTS_EACH = 200
"""A process is replaced after so many requests: whatever it leaked goes with it."""


class Cancelled(CkptguardError):
    """Somebody asked for the job to stop."""


class ChildDied(CkptguardError):
    """The process ended in the middle of its work."""


class Child:
    """One reading process, started when it is needed. Used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0
        self._rest = b""

    def ask(
        self, request: Mapping[str, Any], *, timeout: float, progress: Callable[[str, int], None],
        cancelled: Callable[[], bool], part: Callable[[dict[str, Any]], None] = lambda body: None,
    ) -> dict[str, Any]:  # fmt: skip
        """The answer to one request; `part` gets what is certain before it. Raises Cancelled, TimedOut, ChildDied, or the error that the child met."""
        process = self._started()
        assert process.stdin is not None
        self._asked += 1
        deadline = time.monotonic() + timeout
        try:
            process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            self.end()
            raise ChildDied("the reading process ended before it was asked") from error
        while True:
            line = self._line(0.5)
            if line is not None:
                answer = json.loads(line)
                if "progress" in answer:
                    progress(answer["progress"]["file"], answer["progress"]["bytes"])
                elif "part" in answer:
                    part(answer["part"])
                elif "error" in answer:
                    if answer["error"]["code"] in ("internal", "memory"):
                        self.end()  # whatever state it is in now, the next request begins afresh
                    raise _raised(answer["error"])
                else:
                    done: dict[str, Any] = answer["done"]
                    return done
            if cancelled():
                self.end()
                raise Cancelled("cancelled")
            if time.monotonic() > deadline:
                self.end()
                raise TimedOut(f"no answer within {timeout:.0f} s")

    def end(self) -> None:
        """Kill the process; the next request starts another."""
        process, self._process, self._rest = self._process, None, b""
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and (self._process.poll() is not None or self._asked >= REQUESTS_EACH):
            self.end()
        if self._process is None:
            self._asked = 0
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ckptguard.jobs.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._process

    def _line(self, wait: float) -> bytes | None:
        """The next line, None when none came in time. Raises ChildDied."""
        assert self._process is not None
        assert self._process.stdout is not None
        if b"\n" not in self._rest:
            descriptor = self._process.stdout.fileno()
            ready, _, _ = select.select([descriptor], [], [], wait)
            if not ready:
                return None
            more = os.read(descriptor, 1 << 20)
            if not more:
                status = self._process.wait()
                self.end()
                raise ChildDied(f"the reading process ended with status {status}")
            self._rest += more
            if b"\n" not in self._rest:
                return None
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _raised(error: Mapping[str, str]) -> CkptguardError:
    kinds: tuple[type[CkptguardError], ...] = (
        TargetNotFound,
        NothingRecognised,
        StoreDenied,
        StoreError,
        OutOfMemory,
    )
    kind = next((k for k in kinds if k.error_code == error["code"]), CkptguardError)
    return kind(error["message"], error.get("hint", ""))


class Children:
    """As many reading processes as jobs may work at once; each thread has its own."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._all: list[Child] = []

    def mine(self) -> Child:
        child: Child | None = getattr(self._local, "child", None)
        if child is None:
            child = self._local.child = Child()
            with self._lock:
                self._all.append(child)
        return child

    def end(self) -> None:
        with self._lock:
            for child in self._all:
                child.end()

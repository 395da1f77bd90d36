"""Runs one of our own commands for a job: in its own process, with a time limit, and its words in the job's log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from ckptguard.errors import CkptguardError, TimedOut
from ckptguard.jobs.children import Cancelled
from ckptguard.jobs.task import Task

POLITE = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended: its exit status, and the document that it printed (None where it printed none)."""

    status: int
    document: Any


def ckptguard(task: Task, arguments: Sequence[str], timeout: float) -> Answer:
    """`ckptguard ARGUMENTS --json`. Raises Cancelled, TimedOut, or the error of the command's error document."""
    task.log(f"ckptguard {' '.join(arguments)}")
    process = subprocess.Popen(
        [sys.executable, "-c", "from ckptguard.cli import main; main()", *arguments, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    printed: list[str] = []
    readers = [
        threading.Thread(target=_collect, args=(process.stdout, printed), daemon=True),
        threading.Thread(target=_log, args=(process.stderr, task), daemon=True),
    ]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + timeout
    try:
        while process.poll() is None:
            if task.cancelled():
                raise Cancelled("cancelled")
            if time.monotonic() > deadline:
                raise TimedOut(f"ckptguard {arguments[0]} took longer than {timeout:.0f} s")
            time.sleep(0.2)
    finally:
        _end(process)
        for reader in readers:
            reader.join(timeout=POLITE)
    return _answer(process.returncode, "".join(printed))


def _answer(status: int, text: str) -> Answer:
    try:
        document = json.loads(text) if text.strip() else None
    except ValueError:
        document = None
    if isinstance(document, dict) and isinstance(document.get("error"), dict):
        raise CkptguardError(str(document["error"].get("message")), str(document["error"].get("hint") or ""))
    return Answer(status, document)


def _collect(pipe: IO[str], into: list[str]) -> None:
    with pipe:
        into.extend(pipe)


def _log(pipe: IO[str], task: Task) -> None:
    with pipe:
        for line in pipe:
            task.log(line.rstrip())


def _end(process: subprocess.Popen[str]) -> None:
    """The command and all that it started: first politely."""
    if process.poll() is not None:
        return
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout=POLITE)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
        break
    process.wait()

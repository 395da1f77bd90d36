"""Our own step log `steps-RANK.jsonl`: one line a step, append-only, readable after `kill -9` at any moment.

A line is one write to a file opened for appending, so that it is there whole or not at all once the call returned; only
a crash of the machine can tear the last one, and the next attempt then begins on a fresh line. Beside steps there are
events (`start`, `save`, `note`), which carry what belongs to no single step.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ckptguard.logs._base import parse_json, row_of, whole
from ckptguard.model import LogRow

SCHEMA = 1
_NAME = re.compile(r"steps-(\d+)\.jsonl")
_TAIL = 1 << 16


def log_name(rank: int) -> str:
    return f"steps-{rank}.jsonl"


class StepLog:
    """Reads `steps-RANK.jsonl`."""

    name = "step-log"

    def claims(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None

    def rows(self, data: bytes) -> tuple[LogRow, ...]:
        """Steps and events in the order of the file; a torn line is skipped. Never raises."""
        rows = (row_of(values, span=max(1, whole(values.get("span")) or 1)) for values in _objects(data))
        return tuple(row for row in rows if row is not None)


class StepLogWriter:
    """Appends to the step log of one rank. Every method may raise OSError: the Recorder steps aside then.

    `attempt` is one more than that of the last line that is there.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path = path
        self.rank = rank
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, _TAIL, max(0, size - _TAIL))
        self.attempt = last_attempt(tail) + 1
        if tail and not tail.endswith(b"\n"):
            os.write(self._fd, b"\n")

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one step. `values` are JSON values; NaN and infinity are kept."""
        self._append({"attempt": self.attempt, "rank": self.rank, "step": step, **values})

    def event(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Append something that happened at (after) a step."""
        self._append({"event": event, "attempt": self.attempt, "rank": self.rank, "step": step, **values})

    def sync(self) -> None:
        """Bring every line so far to the disk; called at saves, never at steps."""
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> StepLogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, values: Mapping[str, Any]) -> None:
        line = json.dumps(values, separators=(",", ":"), default=str).encode() + b"\n"
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(f"{self.path}: {written} of {len(line)} bytes were written; is the disk full?")


def last_attempt(data: bytes) -> int:
    """The attempt of the last whole line, 0 where there is none."""
    for line in reversed(data.splitlines()):
        values = parse_json(line)
        attempt = whole(values.get("attempt")) if isinstance(values, dict) else None
        if attempt is not None and attempt > 0:
            return attempt
    return 0


def _objects(data: bytes) -> list[dict[str, Any]]:
    parsed = (parse_json(line) for line in data.splitlines())
    return [values for values in parsed if isinstance(values, dict)]

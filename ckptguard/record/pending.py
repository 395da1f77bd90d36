"""Rows whose numbers may still be on their way from a device, written in order as soon as that costs no waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from ckptguard.logs.steplog import StepLogWriter
from ckptguard.record.scalars import Reading, read_later

PATIENCE = 50
"""Steps that may wait for a device which cannot tell when a number is there; then they are read."""


class PendingRows:
    """The step log with a queue before it."""

    def __init__(self, log: StepLogWriter) -> None:
        self._log = log
        self._rows: deque[tuple[int, Reading, Mapping[str, Any]]] = deque()

    def add(self, step: int, numbers: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Queue a step and write what is ready. `numbers` may be tensors; `values` are JSON values."""
        self._rows.append((step, read_later(numbers), values))
        while self._rows and (self._rows[0][1].ready() or len(self._rows) > PATIENCE):
            self._write()

    def write_all(self) -> None:
        """Write every row; waits for the device."""
        while self._rows:
            self._write()

    def _write(self) -> None:
        step, reading, values = self._rows.popleft()
        row = {**reading.numbers(), **values}
        self._log.step(step, {name: value for name, value in row.items() if value is not None})

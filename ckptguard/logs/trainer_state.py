"""`trainer_state.json` of the Hugging Face Trainer: `log_history` holds the metrics of all steps so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptguard.logs._base import parse_json, row_of, whole
from ckptguard.model import LogRow


class TrainerState:
    """`trainer_state.json`. Its losses are means over the steps since the row before: `span` says over how many."""

    name = "trainer-state"

    def claims(self, name: str) -> bool:
        return name == "trainer_state.json"

    def rows(self, data: bytes) -> tuple[LogRow, ...]:
        """The rows of the history, in its order. Never raises."""
        state = parse_json(data)
        return history_rows(state) if isinstance(state, dict) else ()


def history_rows(state: Mapping[str, Any]) -> tuple[LogRow, ...]:
    """The rows of a trainer's state that was parsed already."""
    history = state.get("log_history")
    if not isinstance(history, list):
        return ()
    interval = whole(state.get("logging_steps"))
    rows: list[LogRow] = []
    logged = 0
    for values in history:
        if not isinstance(values, dict):
            continue
        span = 1
        step = whole(values.get("step"))
        if step is not None and "loss" in values:
            span = max(1, step - logged if step > logged else 1)
            if interval is not None and interval >= 1:
                # A longer gap is one of the log, not of the mean: the Trainer averages over `logging_steps` at most.
                span = min(span, interval)
            logged = step
        row = row_of(values, span=span)
        if row is not None:
            rows.append(row)
    return tuple(rows)

"""Whether the training was well around a checkpoint's step, from its log. Pure.

Integrity and health are two facts: a checkpoint inside a loss spike may be whole and still be the wrong one to resume
from. No absolute threshold: the run's own window is the measure, and a jump must last.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from ckptguard.model import Health, LogRow

WINDOW = 50  # rows before the look that make the baseline
LOOK = 5  # rows up to the step that are looked at
ENOUGH = 10  # rows that a baseline needs
SPREADS = 8.0
RELATIVE = 0.25


def health_at(rows: Sequence[LogRow], step: int | None) -> Health:
    """The health of a checkpoint of this step. `rows` are the run's log, of all attempts, in the order of writing."""
    if step is None:
        return Health()
    line = _last_attempt(rows, step)
    if len(line) < 2:
        return Health()
    bad = next((r.step for r in reversed(line) if r.loss is not None and not math.isfinite(r.loss)), None)
    if bad is not None and not any(r.step > bad and math.isfinite(r.loss or 0.0) for r in line):
        first = _first_of_tail(line, lambda r: r.loss is not None and not math.isfinite(r.loss))
        return Health("unhealthy", first, step - first + 1)
    losses = [r for r in line if r.loss is not None and math.isfinite(r.loss)]
    recent, before = losses[-LOOK:], losses[-LOOK - WINDOW : -LOOK]
    if len(before) < ENOUGH:
        return Health("healthy" if losses else "unknown")
    middle = statistics.median(r.loss or 0.0 for r in before)
    spread = statistics.median(abs((r.loss or 0.0) - middle) for r in before)
    limit = middle + max(SPREADS * 1.4826 * spread, RELATIVE * abs(middle))
    high = [r for r in recent if (r.loss or 0.0) > limit]
    if len(high) >= 3 or (recent and recent[-1] in high and len(high) >= 2):
        return Health("suspect", high[0].step, max(0, step - high[0].step + 1))
    return Health("healthy")


def _last_attempt(rows: Sequence[LogRow], step: int) -> list[LogRow]:
    """The rows that led to a step: what a resume repeated counts as it was written last."""
    by_step: dict[int, LogRow] = {}
    for row in rows:
        if row.step <= step:
            by_step[row.step] = row
    return [by_step[s] for s in sorted(by_step)]


def _first_of_tail(line: Sequence[LogRow], bad: Callable[[LogRow], bool]) -> int:
    first = line[-1].step
    for row in reversed(line):
        if not bad(row):
            break
        first = row.step
    return first

"""Which rows of a log continue a checkpoint, and how finely they were written down. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

from ckptguard.model import LogRow
from ckptguard.restore.model import METRICS

FULL_DIGITS = 8
"""A column that has a value with so many significant digits was written in full, not rounded for the eye."""


def training_rows(rows: Iterable[LogRow]) -> list[LogRow]:
    """The rows of the first rank that state anything of a training step (no events, no evaluations)."""
    return [
        row
        for row in rows
        if row.extra.get("rank") in (None, 0, "0")
        and any(getattr(row, metric) is not None for metric in METRICS)
    ]


def continuation(rows: Sequence[LogRow], step: int, attempt: int | None = None) -> tuple[LogRow, ...]:
    """The rows after `step` of the attempt that wrote the checkpoint when that is known, else of the first after it.

    Several rows of one step are joined. The rows end where that attempt does: where the steps go back.
    """
    rows = training_rows(rows)
    if attempt is not None and any(row.attempt is not None for row in rows):
        own = [row for row in rows if row.attempt == attempt and row.step > step]
        # The attempt that wrote it may have ended there: then a later one continues it.
        later = [row for row in rows if (row.attempt or 0) > attempt and row.step > step]
        rows = own or later
    start = next((at for at, row in enumerate(rows) if _continues(rows, at, step)), None)
    if start is None:
        return ()
    found: list[LogRow] = []
    for row in rows[start:]:
        if found and (row.step < found[-1].step or row.attempt != found[0].attempt):
            break
        if found and row.step == found[-1].step:
            found[-1] = _join(found[-1], row)
        else:
            found.append(row)
    return tuple(found)


def _continues(rows: Sequence[LogRow], at: int, step: int) -> bool:
    """Whether the row is the first after `step` of its attempt: it covers the next step, or follows one before."""
    row = rows[at]
    if row.step <= step:
        return False
    return row.step - row.span <= step or (at > 0 and rows[at - 1].step <= step)


def _join(first: LogRow, second: LogRow) -> LogRow:
    values = {m: getattr(first, m) if getattr(first, m) is not None else getattr(second, m) for m in METRICS}
    return LogRow(
        step=first.step,
        epoch=first.epoch,
        attempt=first.attempt,
        span=max(first.span, second.span),
        extra={**second.extra, **first.extra},
        **values,
    )


def steps_to_replay(rows: Sequence[LogRow], step: int, wanted: int, most: int = 64) -> int:
    """How many steps to replay: `wanted`, or as many as the first whole row of a log of means needs, up to `most`."""
    whole = next((row.step - step for row in rows if row.step - row.span >= step), 0)
    return max(wanted, whole) if whole <= most else wanted


# --- how finely a column was written --------------------------------------------------------------------


def _digits(value: float) -> tuple[int, int]:
    """(significant digits, decimal places) of the shortest text that stands for the value."""
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)  # finite
    return len(digits), max(0, -exponent)


class Precision:
    """How far a logged value may lie from the number that was logged, judged by its whole column.

    A log that writes `2.3145` for 2.31448… cannot tell more; one that writes all digits can. Columns of one single
    value (a constant learning rate) count as written in full.
    """

    def __init__(self, rows: Iterable[LogRow]) -> None:
        columns: dict[str, set[float]] = {metric: set() for metric in METRICS}
        for row in rows:
            for metric in METRICS:
                value = getattr(row, metric)
                if value is not None and math.isfinite(value):
                    columns[metric].add(float(value))
        self._columns: Mapping[str, tuple[int, int] | None] = {m: _column(v) for m, v in columns.items()}

    def of(self, metric: str, value: float) -> float:
        """Half a unit of the last place that the log writes; 0 where it writes in full."""
        column = self._columns.get(metric)
        if column is None or not math.isfinite(value):
            return 0.0
        significant, decimals = column
        by_places = 0.5 * 10.0**-decimals
        size = math.floor(math.log10(abs(value))) if value else -decimals
        by_digits = 0.5 * 10.0 ** (size - significant + 1)
        # Slightly more: the value lies exactly half a unit off when the writer rounded half to even.
        return max(by_places, by_digits) * (1 + 1e-9)


def _column(values: set[float]) -> tuple[int, int] | None:
    if len(values) < 2:
        return None
    measured = [_digits(value) for value in values]
    significant = max(digits for digits, _ in measured)
    decimals = max(places for _, places in measured)
    if significant >= FULL_DIGITS or all(value == int(value) for value in values):
        return None
    return significant, decimals

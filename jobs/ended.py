"""Pure: when a save that bears no mark of its end is over, by what happened around it.

A file that ends early may still be being written. Its save is over once it has lain still for longer than a save of this
run takes, or lies still though the training went on: a later save began, its log is past it, a pointer names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEAST = 30.0
"""Nothing is concluded of what changed less than so many seconds ago, whatever else speaks for it."""


def still(row: Mapping[str, Any], now: float, stall_after: float) -> bool:
    """Whether a save has not changed for long enough to ask whether it is over; `row` is one of the catalog's checkpoints."""
    return now - float(row["changed_at"] or now) >= min(LEAST, stall_after)


def is_over(
    row: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    now: float,
    stall_after: float,
) -> bool:
    """Whether nobody will go on with a save. `rows` are the checkpoints of its run.

    Ages are by our own clock; how long a save usually takes is not known of a run before it was watched for some.
    """
    idle = now - float(row["changed_at"] or now)
    if idle >= stall_after:
        return True
    if not still(row, now, stall_after):
        return False
    usual = (run["usual"] or {}).get("seconds")
    return (usual is not None and idle > usual) or _passed(row, rows, run)


def _passed(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> bool:
    """Whether the training went on after the last change of a save: to a later save, or in its log."""
    if row["step"] is None:
        return False
    later = any(
        other["step"] is not None and other["step"] > row["step"] and other["first_seen"] > row["changed_at"]
        for other in rows
    )
    logged = run["step"] is not None and run["step"] > row["step"] and run["step_at"] is not None
    return later or (logged and run["step_at"] > row["changed_at"])

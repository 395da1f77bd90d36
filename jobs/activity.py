"""Pure: whether a training runs, from its log, its planned steps and its rhythm; and what its log gives away at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from ckptguard.model import LogRow
from ckptguard.units import duration

LEAST = 60.0
"""Nothing is concluded from a shorter silence, however fast the steps are."""
PATIENCE = 2.0


class State(StrEnum):
    """What a run does."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Pulse:
    """How one log (of one rank) beats. `pause` is the longest silence that its own attempts have survived."""

    file: str
    rank: int | None
    step: int | None
    at: float | None
    interval: float | None
    pause: float | None

    @property
    def patience(self) -> float:
        """Seconds of silence that are normal: two logging intervals, or a pause (an evaluation, a save) it had before."""
        return max(LEAST, PATIENCE * (self.interval or 0.0), 1.5 * (self.pause or 0.0))


@dataclass(frozen=True, slots=True)
class Activity:
    """The state of a run and why; `since` is the time of the last sign of life where it is paused."""

    state: State
    since: float | None
    reason: str
    step: int | None = None


def time_of(row: LogRow) -> float | None:
    """When a row was written, in epoch seconds, where it says so."""
    for key in ("time", "timestamp", "wall_time", "_timestamp"):
        value = row.extra.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 1e8 < value < 1e11:
            return float(value)
    return None


def pulse(
    file: str, rank: int | None, before: Pulse | None, rows: Sequence[LogRow], modified: float
) -> Pulse:
    """The beat of a log after new rows. Rows without a time count as written when the file was."""
    steps = [row for row in rows if "event" not in row.extra]
    if not steps:
        return before or Pulse(file, rank, None, None, None, None)
    times = [t for row in steps if (t := time_of(row)) is not None]
    attempts = {row.attempt for row in steps}
    gaps = [b - a for a, b in itertools.pairwise(times) if b > a]
    if before is not None and before.at is not None and times and len(attempts) == 1 and times[0] > before.at:
        gaps.append(times[0] - before.at)
    known = ([before.interval] if before and before.interval else []) + gaps
    interval = median(known) if known else None
    usual = max(LEAST, PATIENCE * (interval or 0.0))
    # A silence beyond the usual that the same attempt came back from is one of its habits; a restart is not.
    survived = [gap for gap in gaps if gap > usual] if len(attempts) == 1 else []
    pauses = survived + ([before.pause] if before and before.pause else [])
    return Pulse(
        file=file,
        rank=rank,
        step=max(row.step for row in steps[-1:]),
        at=times[-1] if times else modified,
        interval=interval,
        pause=max(pauses, default=None),
    )


def activity(
    pulses: Sequence[Pulse], now: float, *, total_steps: int | None, newest_step: int | None,
    last_change: float | None, save_interval: float | None, ended: bool = False,
) -> Activity:  # fmt: skip
    """The state of a run. Without a log its saves are its only signs of life.

    `newest_step` and `last_change` are of its checkpoints; `ended`: its log says that the training came to its end.
    """
    beats = [p for p in pulses if p.at is not None]
    step = max((p.step for p in beats if p.step is not None), default=newest_step)
    reached = max((s for s in (step, newest_step) if s is not None), default=None)
    if total_steps is not None and reached is not None and reached >= total_steps:
        return Activity(State.FINISHED, None, f"step {reached} of {total_steps} planned was reached", step)
    if ended:
        return Activity(State.FINISHED, None, "its log says that the training ended", step)
    if beats:
        last = max(beats, key=lambda p: p.at or 0.0)
        silence = now - (last.at or 0.0)
        if silence <= last.patience:
            return Activity(
                State.RUNNING, None, f"step {step} was logged {duration(max(0.0, silence))} ago", step
            )
        reason = (
            f"nothing was logged for {duration(silence)}; {duration(last.patience)} is the most that is usual"
        )
        return Activity(State.PAUSED, last.at, reason, step)
    if last_change is None:
        return Activity(State.QUEUED, None, "no checkpoint and no log yet", step)
    silence = now - last_change
    if silence <= max(900.0, 2.0 * (save_interval or 0.0)):
        return Activity(State.RUNNING, None, f"a checkpoint changed {duration(max(0.0, silence))} ago", step)
    return Activity(
        State.PAUSED, last_change, f"no checkpoint changed for {duration(silence)}, and no log is known", step
    )


@dataclass(frozen=True, slots=True)
class Anomaly:
    """What a log gives away without looking at its history: the full diagnosis is `ckptguard diagnose`."""

    code: str
    severity: str
    step: int | None
    scope: str
    evidence: str


def nonfinite(rows: Iterable[LogRow]) -> Iterator[Anomaly]:
    """The first row of a stretch whose loss is no number. A skipped step of the loss scaler is not one."""
    for row in rows:
        if row.loss is not None and not math.isfinite(row.loss) and not row.extra.get("skipped"):
            yield Anomaly(
                "nonfinite-loss", "error", row.step, "global", f"the loss of step {row.step} is {row.loss}"
            )
            return


def lost_ranks(pulses: Sequence[Pulse], now: float) -> Iterator[Anomaly]:
    """Ranks that fell silent while others went on."""
    ranked = [p for p in pulses if p.rank is not None and p.at is not None and p.step is not None]
    if len(ranked) < 2:
        return
    ahead = max(ranked, key=lambda p: p.at or 0.0)
    if now - (ahead.at or 0.0) > ahead.patience:
        return
    for p in sorted(ranked, key=lambda p: p.rank or 0):
        silence = (ahead.at or 0.0) - (p.at or 0.0)
        if silence > max(p.patience, ahead.patience) and (p.step or 0) < (ahead.step or 0):
            yield Anomaly(
                "rank-lost", "error", p.step, "rank",
                f"rank {p.rank} logged step {p.step} last; rank {ahead.rank} is at step {ahead.step}, "
                f"{duration(silence)} later",
            )  # fmt: skip


def stopped(
    activity: Activity, saved_step: int | None, now: float, *, after: float, planned: int | None
) -> Iterator[Anomaly]:
    """A training that stopped with work that no checkpoint holds. One that saved before it left is a queue's business."""
    if activity.state is not State.PAUSED or activity.since is None or activity.step is None:
        return
    unsaved = activity.step - (saved_step or 0)
    silence = now - activity.since
    if unsaved <= 0:
        return
    severity = "warning" if silence >= after else "info"
    goal = f" of {planned}" if planned else ""
    yield Anomaly(
        "no-progress", severity, activity.step, "global",
        f"training stopped at step {activity.step}{goal}, {duration(silence)} ago; "
        f"{unsaved} steps are in no checkpoint",
    )  # fmt: skip

"""Pure: a run's own habits, and what departs from them. Never one fixed threshold: absolute, relative, duration."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ckptguard.codes import finding
from ckptguard.model import Finding, Severity
from ckptguard.settings import PolicySettings
from ckptguard.units import duration, size

ENOUGH = 3
"""With fewer saves a run has no habits yet."""
WINDOW = 20


@dataclass(frozen=True, slots=True)
class Saved:
    """A save that was completed."""

    path: str
    step: int | None
    completed: float
    seconds: float | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Usual:
    """What is usual in a run; None where too little was seen."""

    seconds: float | None = None
    bytes: float | None = None
    interval: float | None = None
    interval_steps: float | None = None


def usual(saves: Sequence[Saved]) -> Usual:
    """The habits that the last saves show (by the time of their completion)."""
    recent = sorted(saves, key=lambda s: s.completed)[-WINDOW:]
    durations = [s.seconds for s in recent if s.seconds is not None]
    gaps = [b.completed - a.completed for a, b in _pairs(recent)]
    steps = [
        b.step - a.step
        for a, b in _pairs(recent)
        if a.step is not None and b.step is not None and b.step > a.step
    ]
    return Usual(
        seconds=_middle(durations),
        bytes=_middle([float(s.bytes) for s in recent]),
        interval=_middle(gaps, ENOUGH - 1),
        interval_steps=_middle([float(s) for s in steps], ENOUGH - 1),
    )


def _pairs(saves: Sequence[Saved]) -> Iterable[tuple[Saved, Saved]]:
    return itertools.pairwise(saves)


def _middle(values: Sequence[float], enough: int = ENOUGH) -> float | None:
    return median(values) if len(values) >= enough else None


def odd_saves(saves: Sequence[Saved], policy: PolicySettings) -> Iterator[Finding]:
    """The newest save against the ones before it: much slower, or much heavier or lighter.

    The first ones are not judged, and neither is a run whose sizes vary by themselves.
    """
    ordered = sorted(saves, key=lambda s: s.completed)
    if len(ordered) <= ENOUGH:
        return
    newest, before = ordered[-1], ordered[:-1]
    habit = usual(before)
    slow = habit.seconds is not None and newest.seconds is not None
    if slow and newest.seconds > max(  # type: ignore[operator]
        policy.slow_factor * habit.seconds,  # type: ignore[operator]
        habit.seconds + policy.slow_seconds,  # type: ignore[operator]
    ):
        yield finding(
            "slow-save",
            newest.path,
            f"the save took {duration(newest.seconds)}; {duration(habit.seconds)} is usual in this run",
            "look at the load and the free space of the storage that the run saves to",
        )
    if habit.bytes and not _varies(before, policy.size_factor):
        factor = newest.bytes / habit.bytes
        if factor > policy.size_factor or factor < 1 / policy.size_factor:
            yield finding(
                "odd-size",
                newest.path,
                f"the checkpoint has {size(newest.bytes)}; {size(habit.bytes)} is usual in this run",
                "compare what it holds with an earlier one: ckptguard audit " + newest.path,
            )


def _varies(saves: Sequence[Saved], factor: float) -> bool:
    """Alternating full and model-only saves, say: then no size is usual."""
    sizes = [s.bytes for s in saves[-WINDOW:] if s.bytes]
    return bool(sizes) and max(sizes) > factor * min(sizes)


def missed(
    saves: Sequence[Saved],
    now: float,
    policy: PolicySettings,
    *,
    target: str,
    running: bool | None,
    step: int | None,
    writing: bool,
) -> Iterator[Finding]:
    """No save for much longer than usual. `running`: whether the log says that training goes on; None without a log.

    Counted in steps where the log has them: an evaluation, or a queue, does not bring a save nearer. Without a log
    nobody can tell a missed save from the end of the training: that is worth knowing, and no alarm.
    """
    habit = usual(saves)
    if habit.interval is None or writing or running is False:
        return
    newest = max(saves, key=lambda s: s.completed)
    late = now - newest.completed
    limit = max(policy.missed_factor * habit.interval, habit.interval + policy.missed_seconds)
    if running and habit.interval_steps and step is not None and newest.step is not None:
        steps = step - newest.step
        if (
            steps > policy.missed_factor * habit.interval_steps
            and late > habit.interval + policy.missed_seconds
        ):
            yield finding(
                "missed-save",
                target,
                f"no save for {steps} steps ({duration(late)}); every {habit.interval_steps:.0f} steps is usual in this run",
                "look at the training's output for errors of the save",
            )
    elif late > limit:
        yield finding(
            "missed-save",
            target,
            f"no save for {duration(late)}; every {duration(habit.interval)} is usual in this run"
            + ("" if running else "; no log tells whether the training still goes on"),
            "look at the training process and its storage",
            severity=None if running else Severity.INFO,
        )


def low_space(
    free_bytes: int | None, free_inodes: int | None, checkpoint_bytes: float | None, checkpoint_files: int | None,
    policy: PolicySettings, target: str,
) -> Iterator[Finding]:  # fmt: skip
    """The next saves will not fit, by what one checkpoint of this run takes."""
    if checkpoint_bytes and free_bytes is not None and free_bytes < policy.saves_ahead * checkpoint_bytes:
        left = free_bytes / checkpoint_bytes
        yield finding(
            "low-space",
            target,
            f"{size(free_bytes)} are free and a checkpoint takes {size(checkpoint_bytes)}: room for {left:.1f} more saves",
            f"make room: ckptguard prune {target} plans what may go",
        )
    elif checkpoint_files and free_inodes is not None and free_inodes < policy.saves_ahead * checkpoint_files:
        yield finding(
            "low-space",
            target,
            f"{free_inodes} inodes are free and a checkpoint takes {checkpoint_files}",
            "remove small files on this file system",
        )

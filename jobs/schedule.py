"""Pure: when a job is due, and which checkpoint is its turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptguard.model import Resume


def first_delay(last_started: float | None, every: float, now: float) -> float:
    """Seconds until a periodic job runs first after a start: what was missed is caught up once, and at once.

    A clock that jumped back makes the last run lie in the future: it counts as just done.
    """
    if last_started is None:
        return 0.0
    return min(every, max(0.0, last_started + every - now))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that is kept, and when it was last looked at in the way that is asked for (None: never)."""

    id: int
    step: int | None
    completed: float
    resume: Resume
    last: float | None
    tries: int = 0


def by_need(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Known bad first (it may have been healed, or belong moved away), then least recently proven; newest first of equals."""
    return sorted(
        candidates,
        key=lambda c: (
            c.resume not in (Resume.UNSAFE, Resume.UNKNOWN) or c.last is None,
            c.last is not None,
            c.last or 0.0,
            -(c.step if c.step is not None else -1),
            -c.completed,
        ),
    )


def due_again(candidates: Sequence[Candidate], now: float, every: float) -> list[Candidate]:
    """Those whose last look is older than `every`, in the order of need."""
    return [c for c in by_need(candidates) if c.last is None or now - c.last >= every]


def _newest(candidates: Sequence[Candidate]) -> Candidate | None:
    return max(candidates, key=lambda c: (c.step if c.step is not None else -1, c.completed), default=None)


def pick_for_restore(
    candidates: Sequence[Candidate], pick: str, *, now: float, window: float, nth: int,
    choose: Callable[[Sequence[Candidate]], Candidate] = random.choice,
) -> Candidate | None:  # fmt: skip
    """The checkpoint to restore next, by the rule of the configuration; None when no safe one fits it.

    `every-nth` takes the oldest of the Nth ones that was never restored.
    """
    safe = sorted(
        (c for c in candidates if c.resume.safe),
        key=lambda c: (c.step if c.step is not None else -1, c.completed),
    )
    if pick == "newest":
        return _newest(safe)
    if pick == "random":
        inside = [c for c in safe if now - c.completed <= window]
        return choose(inside) if inside else _newest(safe)
    return next((c for c in safe[nth - 1 :: nth] if c.last is None), None)


def portion(total_bytes: int, within: float, every: float, max_rate: float) -> int:
    """How many bytes one run of the scrub reads, so that all are read within the time, and never faster than the rate."""
    needed = total_bytes * every / within * 1.25
    return int(min(max(needed, 1 << 20), max_rate * every))


@dataclass(frozen=True, slots=True)
class Extent:
    """A file of a kept checkpoint, and when its bytes were last read."""

    checkpoint: int
    name: str
    size: int
    read_at: float


def next_portion(extents: Sequence[Extent], budget: int) -> list[Extent]:
    """The least recently read files that fit the budget, whole files, at least one."""
    chosen: list[Extent] = []
    used = 0
    for extent in sorted(extents, key=lambda e: e.read_at):
        if chosen and used + extent.size > budget:
            break
        chosen.append(extent)
        used += extent.size
    return chosen


def coverage(extents: Sequence[Extent], now: float, within: float) -> float:
    """The share of kept bytes that were read within the time, 1.0 where there are none."""
    total = sum(e.size for e in extents)
    fresh = sum(e.size for e in extents if now - e.read_at <= within)
    return fresh / total if total else 1.0

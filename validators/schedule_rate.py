from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding
from ckptguard.ports import Subject
from ckptguard.validators._base import close, comparable, number, stated_step

NEEDED = ("max_lr", "min_lr", "lr_decay_style", "lr_decay_steps", "lr_warmup_steps", "num_steps")


class ScheduleRate:
    """Whether the stored learning rate is the one that Megatron's schedule has at its own number of samples.

    Finds: parameter groups of which none has the rate that the schedule's closed form gives.
    Why it matters: Megatron computes the rate from the counter at the next step: what was stored is overwritten, and a
    counter or a maximum of another run changes the rate at once.
    Example: an optimizer state taken from another iteration than the schedule.
    What to do: resume from a checkpoint whose parts agree.
    Blind spots: the warm-up, whose first rate is not stored; schedules of other frameworks; a schedule changed by
    --override-opt-param-scheduler shows the same difference in all later checkpoints and is taken as configured.
    """

    name = "schedule-rate"
    needs = Evidence.STRUCTURE
    codes = ("lr-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        if fits(facts) is not False or any(fits(s) is False for s in comparable(subject)):
            return
        rates = ", ".join(f"{rate:.6g}" for rate, _ in _groups(facts)[:3])
        schedule = facts.state.schedulers[0]
        planned = _rate(schedule.values, int(number(schedule.values.get("num_steps")) or 0), {})
        yield finding(
            "lr-mismatch",
            facts.state.optimizers[0].subject,
            f"the optimizer has the learning rate {rates}; its schedule gives {planned:.6g} at {schedule.values.get('num_steps')} samples",
        )


def fits(facts: CheckpointFacts) -> bool | None:
    """Whether a group has the schedule's rate, now or one batch ago; None where that cannot be computed."""
    schedules, groups = facts.state.schedulers, _groups(facts)
    if len(schedules) != 1 or not groups or not all(key in schedules[0].values for key in NEEDED):
        return None
    values = schedules[0].values
    samples, step = number(values.get("num_steps")), stated_step(facts)
    if samples is None or samples <= (number(values.get("lr_warmup_steps")) or 0):
        return None
    batch = facts.state.attributes.get("global_batch_size") or (samples / step if step else 0)
    places = [int(samples), int(samples - batch)]
    planned = [(rate, _rate(values, at, options)) for rate, options in groups for at in places]
    if any(want is None for _, want in planned):
        return None
    return any(close(rate, want, 1e-4) for rate, want in planned if want is not None)


def _groups(facts: CheckpointFacts) -> list[tuple[float, Mapping[str, Any]]]:
    found = []
    for optimizer in facts.state.optimizers:
        for group in optimizer.groups:
            rate = number(group.options.get("lr"))
            if rate is not None:
                found.append((rate, group.options))
    return found


def _rate(values: Mapping[str, Any], samples: int, group: Mapping[str, Any]) -> float | None:
    """Megatron's closed form (megatron/core/optimizer_param_scheduler.py `get_lr`)."""
    high, low = (number(group.get(key, values.get(key))) for key in ("max_lr", "min_lr"))
    warmup, decay = number(values.get("lr_warmup_steps")), number(values.get("lr_decay_steps"))
    if high is None or low is None or warmup is None or decay is None or samples <= warmup or decay <= warmup:
        return None
    multiplier = number(group.get("lr_mult")) or 1.0
    style = str(values.get("lr_decay_style"))
    if style == "constant":
        return high * multiplier
    if samples > decay:
        return low * multiplier
    if style == "inverse-square-root":
        return max(low, high * math.sqrt(max(warmup, 1.0) / max(samples, 1))) * multiplier
    ratio = (samples - warmup) / (decay - warmup)
    share = {"linear": 1.0 - ratio, "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0)}.get(style)
    return None if share is None else (low + share * (high - low)) * multiplier


CHECK = ScheduleRate()

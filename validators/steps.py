from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding
from ckptguard.ports import Subject
from ckptguard.validators._base import (
    comparable,
    number,
    optimizer_steps,
    own_step,
    shared_offset,
    shared_ratio,
    stated_step,
)


class Steps:
    """Whether name, trainer, optimizer, scheduler and log are at the same step.

    Finds: components of different steps in one checkpoint.
    Why it matters: such a checkpoint loads; the training that continues is none that ever ran.
    Example: a scheduler.pt that was copied from the checkpoint before.
    What to do: resume from a checkpoint whose parts agree.
    Blind spots: optimizers without a step counter (SGD, Lion, Muon); an offset that all checkpoints of the run share is
    taken as the way the run counts; skipped steps of a loss scaler are believed where the log confirms them, or where
    they are few.
    """

    name = "steps"
    needs = Evidence.STRUCTURE
    codes = ("step-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        siblings = comparable(subject)
        yield from self._name(facts, siblings)
        step = stated_step(facts)
        if facts.state.attributes.get("free_steps"):
            return  # a layout whose steps are not the optimizer's (reinforcement learning)
        if step is None:
            yield from self._epochs(facts, siblings)
            return
        yield from self._optimizers(subject, siblings, step)
        yield from self._schedulers(subject, siblings, step)
        yield from self._log(facts, step)

    @staticmethod
    def _name(facts: CheckpointFacts, siblings: Sequence[CheckpointFacts]) -> Iterator[Finding]:
        named, stated = facts.manifest.step, own_step(facts)
        if named is None or stated is None or named == stated:
            return
        epochs = [c.value for c in facts.state.counters if c.unit in ("epoch", "save") and c.name != "name"]
        if any(named in (e - 1, e, e + 1) for e in epochs):
            return
        offsets = [
            own - s.manifest.step
            if (own := own_step(s)) is not None and s.manifest.step is not None
            else None
            for s in siblings
        ]
        ratios = [
            own / s.manifest.step if (own := own_step(s)) is not None and s.manifest.step else None
            for s in siblings
        ]
        if shared_offset(stated - named, offsets) or (named and shared_ratio(stated / named, ratios)):
            return
        counters = [c for c in facts.state.counters if c.unit == "step" and c.name != "name"]
        where = counters[0].subject if counters else facts.path
        yield finding(
            "step-mismatch",
            where,
            f"the name says step {named}, {counters[0].name if counters else 'the content'} says {stated}",
        )

    @staticmethod
    def _optimizers(subject: Subject, siblings: Sequence[CheckpointFacts], step: int) -> Iterator[Finding]:
        facts = subject.facts
        known = enumerate(facts.state.optimizers)
        highest = [(i, o, max(s)) for i, o in known if (s := optimizer_steps(o))]
        if len(highest) > 1 and sum(h for _, _, h in highest) == step:
            return  # trainers that count the steps of all optimizers together
        for place, optimizer, count in highest:
            if count != int(count) or (
                count in (step, step + 1) and not _contradicted(step - count, siblings)
            ):
                continue
            behind = step - int(count)
            # Each of several optimizers is compared with itself: one may begin late, or make more steps.
            several = len(facts.state.optimizers)
            offsets = [_behind(s, place if len(s.state.optimizers) == several else None) for s in siblings]
            ratios = [_ratio(s, place if len(s.state.optimizers) == several else None) for s in siblings]
            if behind == 0 or shared_offset(behind, offsets) or (step and shared_ratio(count / step, ratios)):
                continue
            if _other_unit(facts, step, count, siblings):
                continue
            if _skipped(subject, step) == behind or _plausibly_skipped(subject, siblings, step, behind):
                continue
            yield finding(
                "step-mismatch",
                optimizer.subject,
                f"the optimizer has made {int(count)} steps, the checkpoint is of step {step}",
            )

    @staticmethod
    def _epochs(facts: CheckpointFacts, siblings: Sequence[CheckpointFacts]) -> Iterator[Finding]:
        """A loop that states epochs only: the optimizer's own count cannot be that of an epoch before."""
        epoch = _epoch(facts)
        for place, optimizer in enumerate(facts.state.optimizers):
            count = max(optimizer_steps(optimizer), default=0)
            before = next(
                (
                    s
                    for s in siblings
                    if (e := _epoch(s)) is not None and e < (epoch or 0) and _made(s, place) == count
                ),
                None,
            )
            if epoch and count and before is not None:
                yield finding(
                    "step-mismatch",
                    optimizer.subject,
                    f"the optimizer has made {int(count)} steps in epoch {epoch}, as many as in {before.path} of epoch {_epoch(before)}",
                )

    @staticmethod
    def _schedulers(subject: Subject, siblings: Sequence[CheckpointFacts], step: int) -> Iterator[Finding]:
        facts = subject.facts
        optimizer = max((max(s) for o in facts.state.optimizers if (s := optimizer_steps(o))), default=None)
        for place, scheduler in enumerate(facts.state.schedulers):
            count = scheduler_step(scheduler.values)
            if count is None or (
                _natural(facts, count, step, optimizer)
                and not _contradicted_scheduler(step - count, siblings, place, optimizer, count)
            ):
                continue
            others = [(stated_step(s), _scheduler_at(s, place)) for s in siblings]
            known = [(a, b) for a, b in others if a is not None and b is not None]
            if known and (
                all(a - b == step - count for a, b in known)
                or all(a and b and b * step == count * a for a, b in known)
                or _one_period([*known, (step, count)])
            ):
                continue
            yield finding(
                "step-mismatch",
                scheduler.subject,
                f"the scheduler is at step {count}, the checkpoint is of step {step}",
            )

    @staticmethod
    def _log(facts: CheckpointFacts, step: int) -> Iterator[Finding]:
        last = max((row.step for row in facts.state.log), default=None)
        if last is not None and last > step:
            yield finding(
                "step-mismatch",
                facts.path,
                f"the log inside the checkpoint reaches step {last}, the checkpoint says step {step}",
            )


def _epoch(facts: CheckpointFacts) -> int | None:
    return next((c.value for c in facts.state.counters if c.unit == "epoch" and c.name != "name"), None)


def _made(facts: CheckpointFacts, place: int) -> float | None:
    optimizers = facts.state.optimizers
    return max(optimizer_steps(optimizers[place]), default=None) if place < len(optimizers) else None


def _behind(facts: CheckpointFacts, place: int | None = None) -> int | None:
    """By how many steps an optimizer is behind the checkpoint; without a place, the one that made the most."""
    step, count = stated_step(facts), _most(facts) if place is None else _made(facts, place)
    return step - int(count) if step is not None and count is not None else None


def _ratio(facts: CheckpointFacts, place: int | None) -> float | None:
    step, count = stated_step(facts), _most(facts) if place is None else _made(facts, place)
    return count / step if step and count is not None else None


def _most(facts: CheckpointFacts) -> float | None:
    return max((max(s) for o in facts.state.optimizers if (s := optimizer_steps(o))), default=None)


def _other_unit(facts: CheckpointFacts, step: int, count: float, siblings: Sequence[CheckpointFacts]) -> bool:
    """Whether the run counts something else than optimizer steps: no checkpoint's counts agree, and both always grow.

    Iterations of reinforcement learning make a varying number of steps each; accumulation over an epoch's end makes fewer.
    """
    pairs = [(step, count)] + [
        (own, own - b)
        for s in siblings
        if (own := stated_step(s)) is not None and (b := _behind(s)) is not None
    ]
    pairs.sort()
    if len(pairs) == 1:
        # Alone, a whole number of steps for each of what is called an iteration or an update is all that can be known.
        named = next((c.name for c in facts.state.counters if c.unit == "step" and c.name != "name"), "")
        rounds = named.rpartition(".")[2].lower().startswith(("it", "update"))
        if any(_made(facts, i) == step for i in range(len(facts.state.optimizers))):
            return True  # of several networks each may make its own number of steps, or begin late
        return rounds and step > 0 and count >= 2 * step and (not count % step or not count % (step + 1))
    if len(pairs) < 3 or any(abs(a - b) <= 1 for a, b in pairs):
        return False
    ahead = {b > a for a, b in pairs}
    return len(ahead) == 1 and all(one[0] < two[0] and one[1] < two[1] for one, two in pairwise(pairs))


def _contradicted(behind: float, siblings: Sequence[CheckpointFacts]) -> bool:
    """Whether an offset of one, normal where a loop counts from zero, is not the way of this run."""
    known = [b for s in siblings if (b := _behind(s)) is not None]
    return behind != 0 and bool(known) and all(b != behind for b in known)


def _skipped(subject: Subject, step: int) -> int | None:
    """How many steps the loss scaler had skipped by this step: by the checkpoint, else by the log."""
    if subject.facts.state.skipped_steps is not None:
        return subject.facts.state.skipped_steps
    for row in reversed(subject.log):
        if row.step <= step:
            for name, value in row.extra.items():
                if "skipped" in name and isinstance(value, int | float):
                    return int(value)
            break
    return None


def _plausibly_skipped(subject: Subject, siblings: Sequence[CheckpointFacts], step: int, behind: int) -> bool:
    """Without a log: a dynamic scaler may skip some steps, but not most of those since the checkpoint before."""
    if (
        behind <= 0
        or not any(s.values for s in subject.facts.state.scalers)
        or _skipped(subject, step) is not None
    ):
        return False
    earlier = [
        (own, b)
        for s in siblings
        if (own := stated_step(s)) is not None and own < step and (b := _behind(s)) is not None
    ]
    last, before = max(earlier, default=(0, 0))
    passed, skipped = step - last, behind - before
    return 0 <= skipped <= max(2, passed // 3)


def scheduler_step(values: object) -> int | None:
    """How often a scheduler was stepped, None where its state does not say (ReduceLROnPlateau, chained ones)."""
    if not isinstance(values, dict) or "num_bad_epochs" in values:
        return None
    if "last_batch_iteration" in values:
        found = number(values["last_batch_iteration"])
        return None if found is None else int(found) + 1
    found = number(values.get("last_epoch"))
    return None if found is None else int(found)


def _scheduler_at(facts: CheckpointFacts, place: int) -> int | None:
    if place >= len(facts.state.schedulers):
        return None
    return scheduler_step(facts.state.schedulers[place].values)


def _natural(facts: CheckpointFacts, count: int, step: int, optimizer: float | None) -> bool:
    if count in (step, step - 1, step + 1) or (optimizer is not None and count in (optimizer, optimizer - 1)):
        return True
    world = facts.state.topology.get("world_size")
    if isinstance(world, int) and world > 1 and count in (step * world, (optimizer or 0) * world):
        return True
    epochs = [c.value for c in facts.state.counters if c.unit == "epoch"]
    return any(count in (e, e + 1, e - 1) for e in epochs)


def _contradicted_scheduler(
    behind: int, siblings: Sequence[CheckpointFacts], place: int, optimizer: float | None, count: int
) -> bool:
    """An offset of one that no sibling shows, where the optimizer does not explain it either."""
    if behind not in (1, -1) or (optimizer is not None and int(optimizer) == count):
        return False
    known = [
        a - b
        for s in siblings
        if (a := stated_step(s)) is not None and (b := _scheduler_at(s, place)) is not None
    ]
    return bool(known) and all(k != behind for k in known)


def _one_period(pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether one number of steps per scheduler step (an epoch's length) explains all pairs of (step, scheduler step)."""
    low, high = 2.0, float("inf")
    for step, count in pairs:
        low = max(low, step / (count + 1))
        high = min(high, step / count if count else float("inf"))
    return low < high or (low == high and low >= 2 and len(pairs) > 1)


CHECK = Steps()

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding, LogRow
from ckptguard.ports import Subject
from ckptguard.validators._base import close, comparable, number, stated_step


class LearningRate:
    """Whether optimizer, scheduler and log have the same learning rate.

    Finds: a rate in the optimizer that the scheduler does not have, or that the logged schedule never had there.
    Why it matters: a rate ten times too high destroys a run within hours; one too low wastes days before anybody sees it.
    Example: an optimizer file patched for an experiment and left in place.
    What to do: resume from a checkpoint whose rate fits the schedule.
    Blind spots: without a log, optimizer and scheduler may agree on a wrong rate; groups scaled by a constant factor in all
    checkpoints of the run are taken as configured.
    """

    name = "learning-rate"
    needs = Evidence.STRUCTURE
    codes = ("lr-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        siblings = comparable(subject)
        if not facts.state.lr_multiplies:
            yield from self._scheduler(facts, siblings)
            yield from self._base(subject, siblings)
        yield from self._log(subject, siblings)

    @staticmethod
    def _scheduler(facts: CheckpointFacts, siblings: Sequence[CheckpointFacts]) -> Iterator[Finding]:
        for place, (stored, planned) in enumerate(_pairs(facts)):
            for group, (a, b) in enumerate(zip(stored, planned)):
                if close(a, b, 1e-5) or abs(a - b) < 1e-12:
                    continue
                ratios = [s for s in (_ratio(sibling, place, group) for sibling in siblings) if s is not None]
                if b and ratios and all(close(r, a / b, 1e-3) for r in ratios):
                    continue
                yield finding(
                    "lr-mismatch",
                    facts.state.optimizers[place].subject,
                    f"parameter group {group} has the learning rate {a:.6g}, its scheduler says {b:.6g}",
                )
                break

    @staticmethod
    def _base(subject: Subject, siblings: Sequence[CheckpointFacts]) -> Iterator[Finding]:
        """The rates that a schedule is a multiple of: they are those that the optimizer began with, and stay so."""
        facts, before = subject.facts, subject.previous
        if before is None or before not in siblings:
            return
        for place, (now, then) in enumerate(zip(facts.state.schedulers, before.state.schedulers)):
            mine, theirs = _bases(now.values), _bases(then.values)
            began, earlier = _began(facts, place), _began(before, place)
            if mine != theirs and len(mine) == len(theirs) and began == earlier == theirs:
                yield finding(
                    "lr-mismatch",
                    now.subject,
                    f"the schedule goes out from {mine[0]:.6g}, the optimizer began with {began[0]:.6g}, as it does in {before.path}: the rate jumps at the next step",
                )

    @staticmethod
    def _log(subject: Subject, siblings: Sequence[CheckpointFacts]) -> Iterator[Finding]:
        facts = subject.facts
        rows = _rows(subject, facts)
        if not rows or _fits(facts, rows) is not False:
            return
        if siblings and all(_fits(s, _rows(subject, s)) is False for s in siblings):
            return  # the log speaks of another rate than the optimizer's groups
        step = stated_step(facts) or 0
        near = min(rows, key=lambda r: abs(r.step - step))
        yield finding(
            "lr-mismatch",
            facts.state.optimizers[0].subject,
            f"the optimizer has the learning rate {_rates(facts)[0]:.6g} at step {step}, the log has {near.lr:.6g} at step {near.step}",
        )


def _group_rates(facts: CheckpointFacts, place: int) -> list[float]:
    groups = facts.state.optimizers[place].groups
    return [rate for g in groups if (rate := number(g.options.get("lr"))) is not None]


def _planned(values: object) -> list[float]:
    last = values.get("_last_lr") if isinstance(values, dict) else None
    return [rate for v in last if (rate := number(v)) is not None] if isinstance(last, list | tuple) else []


def _bases(values: object) -> list[float]:
    bases = values.get("base_lrs") if isinstance(values, dict) else None
    return [rate for v in bases if (rate := number(v)) is not None] if isinstance(bases, list | tuple) else []


def _began(facts: CheckpointFacts, place: int) -> list[float]:
    """The rates from which an optimizer's groups started, where it is the one of this scheduler."""
    optimizers = facts.state.optimizers
    if len(optimizers) != len(facts.state.schedulers):
        return []
    return [
        rate for g in optimizers[place].groups if (rate := number(g.options.get("initial_lr"))) is not None
    ]


def _pairs(facts: CheckpointFacts) -> list[tuple[list[float], list[float]]]:
    """(rates in the optimizer, rates the scheduler planned), where it is clear which belongs to which."""
    state = facts.state
    # Of one optimizer in parts, a file a rank, the first speaks for all (that they agree is rank-divergence's business).
    if len({o.rank for o in state.optimizers}) > 1 and len(state.schedulers) == 1:
        whole = 1
    else:
        whole = len(state.optimizers)
    if whole != len(state.schedulers):
        return []
    pairs = [(_group_rates(facts, i), _planned(s.values)) for i, s in enumerate(state.schedulers)]
    return [p if len(p[0]) == len(p[1]) else ([], []) for p in pairs]


def _ratio(facts: CheckpointFacts, place: int, group: int) -> float | None:
    pairs = _pairs(facts)
    if place >= len(pairs) or group >= len(pairs[place][0]) or not pairs[place][1][group]:
        return None
    return pairs[place][0][group] / pairs[place][1][group]


def _rates(facts: CheckpointFacts) -> list[float]:
    return [rate for i in range(len(facts.state.optimizers)) for rate in _group_rates(facts, i)]


def _rows(subject: Subject, facts: CheckpointFacts) -> list[LogRow]:
    """Rows with a rate, from the run's log, else from what the checkpoint and newer ones hold themselves."""
    rows = [r for r in subject.log if r.lr is not None]
    if not rows:
        newest = max((s for s in subject.siblings if s.state.log), key=lambda s: s.step or 0, default=None)
        rows = [r for r in (newest.state.log if newest else ()) if r.lr is not None]
        own = [r for r in facts.state.log if r.lr is not None]
        rows = rows if len(rows) >= len(own) else own
    return sorted(rows, key=lambda r: r.step)


def _fits(facts: CheckpointFacts, rows: Sequence[LogRow]) -> bool | None:
    """Whether the stored rate is one that the log has around this step; None where the log cannot tell."""
    step, rates = stated_step(facts), _rates(facts)
    if step is None or not rates or not rows:
        return None
    # Whether a log holds the rate before or after the scheduler's step is the writer's choice: both fit.
    near = [r.lr for r in rows if step <= r.step <= step + 1 and r.lr is not None]
    if any(close(rate, lr, 2e-3) for rate in rates for lr in near):
        return True
    before = [r for r in rows if r.step <= step and r.lr is not None]
    after = [r for r in rows if r.step > step and r.lr is not None]
    if not before:
        return None
    if after:
        ends = [before[-1].lr or 0.0, after[0].lr or 0.0, *near]
        margin = 0.0 if after[0].step == step + 1 else 0.5 * max(ends)
        low, high = min(ends) * 0.99 - margin, max(ends) * 1.01 + margin
        return any(low <= rate <= high for rate in rates)
    # Nothing was logged later: only a rate that the run never had, far above the last one, is certainly wrong.
    known = [r.lr or 0.0 for r in before] + [
        v
        for o in facts.state.optimizers
        for g in o.groups
        if (v := number(g.options.get("initial_lr"))) is not None
    ]
    last = before[-1].lr or 0.0
    return False if last and min(rates) > 1.01 * max(known) and min(rates) > 3 * last else None


CHECK = LearningRate()

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding, OptimizerState, ParamState, Tensor
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, optimizer_steps, stated_step

ADAM = frozenset({"exp_avg", "exp_avg_sq"})


class LostMoments:
    """Whether every parameter still has all of its optimizer state.

    Finds: parameters without a moment, or without any state, that they had in the checkpoint before and that other
    parameters still have; parameters of an Adam group with one of its two moments only.
    Why it matters: what is absent is silently begun afresh, or ends the training with a KeyError at its first step.
    Example: items that a conversion of a sharded optimizer dropped.
    What to do: resume from the checkpoint before.
    Blind spots: a parameter without any state in a run's first checkpoint, or after the optimizer was begun anew, may never
    have had a gradient.
    """

    name = "lost-moments"
    needs = Evidence.STRUCTURE
    codes = ("missing-tensor",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        before = subject.previous
        sound = before if before is not None and before in comparable(subject) else None
        then = _placed(sound.state.optimizers) if sound is not None else {}
        optimizers = subject.facts.state.optimizers
        kept = {key for o in optimizers for s in o.states for key in s.values}
        for place, optimizer in _placed(optimizers).items():
            lost = dict(_single(optimizer))
            twin = then.get(place)
            if twin is not None and sound is not None and not _is_fresh(subject.facts, sound, optimizer):
                lost = {**lost, **dict(_gone(optimizer, twin, kept))}
            if lost:
                key, names = next(iter(lost.items()))
                yield finding(
                    "missing-tensor",
                    f"{optimizer.subject}:{key}",
                    f"{len(lost)} of {len(optimizer.states) or len(lost)} parameters have lost optimizer state: {key} has no {names}"
                    + (f", in {sound.path} it has" if sound is not None and twin is not None else ""),
                )


def _placed(optimizers: Sequence[OptimizerState]) -> dict[tuple[str, int | None, int], OptimizerState]:
    """Optimizers by name, rank, and place among those that have both in common: files may be named by their step."""
    found: dict[tuple[str, int | None, int], OptimizerState] = {}
    for optimizer in optimizers:
        same = sum(1 for name, rank, _ in found if (name, rank) == (optimizer.name, optimizer.rank))
        found[optimizer.name, optimizer.rank, same] = optimizer
    return found


def _is_fresh(now: CheckpointFacts, then: CheckpointFacts, optimizer: OptimizerState) -> bool:
    """Whether the optimizer may have been begun anew since: then parameters without a gradient have no state again."""
    steps, passed = optimizer_steps(optimizer), (stated_step(now) or 0) - (stated_step(then) or 0)
    return bool(steps) and max(steps) <= passed


def _gone(now: OptimizerState, then: OptimizerState, kept: set[str]) -> Iterator[tuple[str, str]]:
    """(parameter, what it lost) since the checkpoint before, where the groups are the same and others still have it."""
    if [g.params for g in now.groups] != [g.params for g in then.groups] or not now.states:
        return
    mine = {s.key: s for s in now.states}
    for state in then.states:
        here = mine.get(state.key)
        lost = sorted(k for k in state.values if k in kept and _has(state, k) and not _has(here, k))
        if lost:
            yield state.key, ", ".join(lost) if here is not None else "state"


def _single(optimizer: OptimizerState) -> Iterator[tuple[str, str]]:
    """(parameter, the moment it lacks): of a group whose others have both of Adam's."""
    states = {s.key: s for s in optimizer.states}
    for group in optimizer.groups:
        members = [states[p] for p in group.params if p in states]
        if not any(s.values.keys() >= ADAM for s in members):
            continue
        for state in members:
            names = state.values.keys()
            if len(ADAM & names) == 1 and names <= {*ADAM, "step", "max_exp_avg_sq", "fp32_master"}:
                yield state.key, next(iter(ADAM - names))


def _has(state: ParamState | None, key: str) -> bool:
    values: Mapping[str, Any] = state.values if state is not None else {}
    value = values.get(key)
    return value is not None and (not isinstance(value, Tensor) or value.numel > 0)


CHECK = LostMoments()

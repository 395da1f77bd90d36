from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding, Tensor
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, number, reached_step, weight_pairs

# A step of less than this part of a half-precision number is rounded away.
HALF = 2.0**-8


class WeightHistory:
    """Weights that are still those of the run's checkpoint before.

    Finds: weights that are bitwise the earlier ones though steps passed: all of them, or some whose optimizer moved on.
    Why it matters: a dead optimizer trains for days on unchanged weights; old weights under new moments are no state that
    the training ever had.
    Example: a model file, or one shard of it, copied from the checkpoint before; an optimizer that still holds the
    parameters of a wrapper.
    What to do: resume from the checkpoint before, after finding out why.
    Blind spots: the first checkpoint of a run; single stale weights where the optimizer keeps no step for each parameter, or
    was lost. Frozen layers, rates of zero and steps too small for half precision are no fault.
    """

    name = "weight-history"
    needs = Evidence.CONTENT
    codes = ("frozen-weights",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        before, facts = subject.previous, subject.facts
        if before is None or before not in comparable(subject):
            return
        pairs = weight_pairs(before, facts)
        unmoved = [n for n, pair in pairs.items() if _equal(pair)]
        if not unmoved or facts.state.attributes.get("ema_as_model") or _all_skipped(facts, before):
            return
        rate = _lowest_rate(facts, before)
        shown = [n for n in unmoved if _would_show(pairs[n][1], rate)]
        steps = (reached_step(facts) or 0) - (reached_step(before) or 0)
        if len(unmoved) == len(pairs):
            if rate != 0 and shown:
                yield finding(
                    "frozen-weights",
                    facts.path,
                    f"all {len(pairs)} weights are those of {before.path}, bit for bit, though {steps} steps passed",
                )
            return
        stale = (
            [n for n in shown if self._trained(subject, before, n)]
            if rate and _moved_on(facts, before)
            else []
        )
        if stale and not _explained(facts, pairs, stale):
            yield finding(
                "frozen-weights",
                facts.state.subject(pairs[stale[0]][1]),
                f"{len(stale)} of {len(pairs)} weights ({', '.join(stale[:3])}) are those of {before.path}, bit for bit, though the optimizer stepped every parameter {steps} times",
            )

    @staticmethod
    def _trained(subject: Subject, before: CheckpointFacts, name: str) -> bool:
        """Whether a tensor is one that training changes: it moved elsewhere in the run, or nothing is there but parameters."""
        run = sorted(
            (s for s in (subject.facts, *comparable(subject)) if reached_step(s) is not None),
            key=lambda s: reached_step(s) or 0,
        )
        sound = [s for s in run if s.path not in subject.unsafe]
        elsewhere = [
            pair
            for one, two in pairwise(sound)
            if two is not subject.facts
            and (pair := weight_pairs(one, two).get(name)) is not None
            and _is_sound(one, pair[0])
            and _is_sound(two, pair[1])
        ]
        if elsewhere:
            return any(_differs(pair) for pair in elsewhere)
        return _only_parameters(subject.facts)


def _is_sound(facts: CheckpointFacts, tensor: Tensor) -> bool:
    """Whether a tensor's numbers are those that were saved, as far as its file can tell: no fault was found in it."""
    file = facts.files.get(facts.state.subject(tensor).partition(":")[0])
    return tensor.facts is not None and (file is None or not file.problems)


def _explained(
    facts: CheckpointFacts, pairs: Mapping[str, tuple[Tensor, Tensor]], stale: Sequence[str]
) -> bool:
    """Whether all that the optimizers hold is found among the other weights: then those that rest are not trained.

    A target network or a teacher is copied now and then, and rests in between.
    """
    left = Counter(t.shape for n, (_, t) in pairs.items() if n not in stale)
    states = [s for o in facts.state.optimizers for s in o.states]
    shapes = [
        shape
        for s in states
        if (
            shape := next((v.shape for v in s.values.values() if isinstance(v, Tensor) and v.numel > 1), None)
        )
    ]
    return 0 < len(states) == len(shapes) and all(left[shape] >= n for shape, n in Counter(shapes).items())


def _equal(pair: tuple[Tensor, Tensor]) -> bool:
    a, b = pair[0].facts, pair[1].facts
    return a is not None and b is not None and a.digest == b.digest


def _differs(pair: tuple[Tensor, Tensor]) -> bool:
    """Whether numbers differ: a tensor that other ranks cut into other chunks has another digest and the same numbers."""
    a, b = pair[0].facts, pair[1].facts
    if a is None or b is None or a.digest == b.digest:
        return False
    same_ends = (a.minimum, a.maximum) == (b.minimum, b.maximum)
    return not (same_ends and math.isclose(a.norm or 0.0, b.norm or 0.0, rel_tol=1e-6))


def _would_show(tensor: Tensor, rate: float | None) -> bool:
    """Whether a step of this rate changes a number of the usual size in this tensor's type."""
    known = tensor.facts
    if rate is None or tensor.dtype not in ("bfloat16", "float16") or known is None or known.norm is None:
        return True
    return rate > HALF * known.norm / math.sqrt(tensor.numel)


def _lowest_rate(facts: CheckpointFacts, before: CheckpointFacts) -> float | None:
    """The rate of the slowest group, by the higher of its rates then and now; None where nothing states one."""
    then, now = _rates(before), _rates(facts)
    return min((max(rate, then.get(group, 0.0)) for group, rate in now.items()), default=None)


def _rates(facts: CheckpointFacts) -> dict[tuple[int, int], float]:
    return {
        (place, index): abs(rate)
        for place, optimizer in enumerate(facts.state.optimizers)
        for index, group in enumerate(optimizer.groups)
        if group.params and (rate := number(group.options.get("lr"))) is not None
    }


def _moved_on(facts: CheckpointFacts, before: CheckpointFacts) -> bool:
    """Whether the optimizer has made steps with every single parameter that it knows since the checkpoint before."""
    now, then = _steps(facts), _steps(before)
    return bool(now) and now.keys() == then.keys() and all(now[k] > then[k] for k in now)


def _steps(facts: CheckpointFacts) -> dict[tuple[int, str], float]:
    found: dict[tuple[int, str], float] = {}
    for place, optimizer in enumerate(facts.state.optimizers):
        for state in optimizer.states:
            step = number(state.values.get("step"))
            if step is None or optimizer.sharded:
                return {}
            found[place, state.key] = step
    return found


def _only_parameters(facts: CheckpointFacts) -> bool:
    """Whether every tensor of the model has an optimizer state whose first moment is not all zero."""
    first = [s.values.get("exp_avg") for o in facts.state.optimizers for s in o.states]
    alive = [m for m in first if isinstance(m, Tensor) and m.facts is not None and not m.facts.zeros]
    return len(alive) == len(first) == len(facts.state.model)


def _all_skipped(facts: CheckpointFacts, before: CheckpointFacts) -> bool:
    """Whether the loss scaler skipped every step since the checkpoint before."""
    skipped, earlier = facts.state.skipped_steps, before.state.skipped_steps
    if skipped is None or earlier is None:
        return False
    return skipped - earlier == (reached_step(facts) or 0) - (reached_step(before) or 0) > 0


CHECK = WeightHistory()

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding, OptimizerState, Tensor
from ckptguard.ports import Subject

# State that has the shape of its parameter, whatever the optimizer (factored and quantised state has not).
LIKE_PARAMETER = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "exp_inf",
    "z",
    "master_param",
)
EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")


class OptimizerShapes:
    """Whether the optimizer's state fits the weights.

    Finds: moments whose shape no weight has, moments of one parameter that disagree, and parameters without a weight.
    Why it matters: optimizers load states of a wrong shape without a word and fail, or broadcast, at the first step.
    Example: an optimizer file that holds rank 0's flat shard only.
    What to do: resume from a checkpoint whose optimizer fits.
    Blind spots: states in a wrong order where shapes are equal; partitioned and quantised states are checked elsewhere.
    """

    name = "optimizer-shapes"
    needs = Evidence.STRUCTURE
    codes = ("shape-mismatch", "missing-tensor")

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        if not facts.state.model:
            return
        for optimizer in facts.state.optimizers:
            if optimizer.sharded:
                continue
            yield from self._within(facts, optimizer)
            yield from self._against_sibling(subject, optimizer)
            yield from self._against_weights(facts, optimizer)

    @staticmethod
    def _within(facts: CheckpointFacts, optimizer: OptimizerState) -> Iterator[Finding]:
        for state in optimizer.states:
            shapes = {
                k: v.shape
                for k, v in state.values.items()
                if k in LIKE_PARAMETER and isinstance(v, Tensor) and not v.local_of
            }
            if len(set(shapes.values())) > 1:
                words = ", ".join(f"{k} {list(s)}" for k, s in shapes.items())
                yield finding(
                    "shape-mismatch",
                    f"{optimizer.subject}:{state.key}",
                    f"parameter {state.key} has states of several shapes: {words}",
                )

    @staticmethod
    def _against_sibling(subject: Subject, optimizer: OptimizerState) -> Iterator[Finding]:
        """The same parameter in the checkpoint before: a state that changed its shape belongs to another parameter."""
        before = subject.previous
        mine = [o.name for o in subject.facts.state.optimizers]
        if (
            before is None
            or [o.name for o in before.state.optimizers] != mine
            or mine.count(optimizer.name) != 1
        ):
            return
        twin = before.state.optimizers[mine.index(optimizer.name)]
        if [g.params for g in twin.groups] != [g.params for g in optimizer.groups]:
            return
        if {n: t.shape for n, t in before.state.model.items()} != {
            n: t.shape for n, t in subject.facts.state.model.items()
        }:
            return
        then = {s.key: m.shape for s in twin.states if (m := _moment(s.values)) is not None}
        moved = [
            s.key
            for s in optimizer.states
            if (m := _moment(s.values)) is not None and then.get(s.key, m.shape) != m.shape
        ]
        if moved:
            yield finding(
                "shape-mismatch",
                f"{optimizer.subject}:{moved[0]}",
                f"{len(moved)} optimizer states have other shapes than in {before.path} (parameter {moved[0]} is one): they are in another order",
            )

    @staticmethod
    def _against_weights(facts: CheckpointFacts, optimizer: OptimizerState) -> Iterator[Finding]:
        weights = facts.state.model
        if optimizer.named:
            for state in optimizer.states:
                moment = _moment(state.values)
                weight = weights.get(state.key)
                if moment is None or weight is None or moment.shape == weight.shape:
                    continue
                yield finding(
                    "shape-mismatch",
                    f"{optimizer.subject}:{state.key}",
                    f"{state.key} has the shape {list(weight.shape)}, its optimizer state {list(moment.shape)}",
                )
            if any(state.key in weights for state in optimizer.states):
                return
        available = Counter(t.shape for t in weights.values())
        wanted = Counter(
            m.shape for s in optimizer.states if (m := _moment(s.values)) is not None and not m.local_of
        )
        if not available or facts.state.attributes.get("partial_model"):
            return
        stacked = _stacked(wanted, weights)
        for shape, count in wanted.items():
            if count > available[shape] and shape not in stacked:
                key = next(
                    s.key
                    for s in optimizer.states
                    if (m := _moment(s.values)) is not None and m.shape == shape
                )
                yield finding(
                    "shape-mismatch",
                    f"{optimizer.subject}:{key}",
                    f"the optimizer has {count} states of shape {list(shape)} (parameter {key} is one), the model {available[shape]} tensors of that shape",
                )


def _stacked(wanted: Mapping[tuple[int, ...], int], weights: Mapping[str, Tensor]) -> set[tuple[int, ...]]:
    """Shapes of states of experts that are one tensor in training and a tensor each on disk (transformers since 5.0)."""
    numbers = {int(m.group(1)) for n in weights if (m := EXPERT.search(n))}
    available = Counter(t.shape for t in weights.values())
    odd = {s: c for s, c in wanted.items() if c > available[s]}
    fit = {s: c for s, c in odd.items() if len(s) == 3 and s[0] == len(numbers)}
    held = sum(t.numel for n, t in weights.items() if EXPERT.search(n))
    return set(fit) if sum(math.prod(s) * c for s, c in fit.items()) <= held else set()


def _moment(values: object) -> Tensor | None:
    if not isinstance(values, dict):
        return None
    return next(
        (v for k in LIKE_PARAMETER if isinstance(v := values.get(k), Tensor) and v.dtype != "uint8"), None
    )


CHECK = OptimizerShapes()

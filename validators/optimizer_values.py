from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding, OptimizerState, Tensor
from ckptguard.ports import Subject
from ckptguard.validators._base import number, stated_step

# State that an update rule squares, so that it cannot be negative (torch.optim, transformers' Adafactor, Apex).
NEVER_NEGATIVE = frozenset(
    {
        "exp_avg_sq",
        "max_exp_avg_sq",
        "square_avg",
        "sum",
        "exp_inf",
        "acc_delta",
        "variance",
        "row_var",
        "col_var",
        "exp_avg_sq_row",
        "exp_avg_sq_col",
        "v",
    }
)

# A mean of numbers above this has squares that its type can hold. Half precision cannot hold those of ordinary gradients.
SQUARABLE = {"float32": 1e-15, "bfloat16": 1e-15, "float64": 1e-100}


class OptimizerValues:
    """Optimizer state that its own update rule cannot produce.

    Finds: negative second moments, second moments that are all zero beside first ones that are not, negative or
    fractional step counters, and no state at all though steps were taken.
    Why it matters: a negative second moment is NaN at the first step, one of zero makes that step enormous; an empty state
    is an optimizer that starts afresh.
    Example: every checkpoint of a loop that rebuilt its optimizer inside the epoch and saved the unused one.
    What to do: resume from another checkpoint; without one, start the optimizer afresh on purpose, with a warmup.
    Blind spots: moments of a right form and a wrong value; optimizers without squares.
    """

    name = "optimizer-values"
    needs = Evidence.STRUCTURE
    codes = ("invalid-optimizer",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        for place, optimizer in enumerate(facts.state.optimizers):
            yield from self._values(facts, optimizer)
            yield from self._vanished(facts, optimizer)
            yield from self._steps(facts, optimizer)
            yield from self._empty(subject, optimizer, place)

    @staticmethod
    def _values(facts: CheckpointFacts, optimizer: OptimizerState) -> Iterator[Finding]:
        for state in optimizer.states:
            for key, value in state.values.items():
                if key in NEVER_NEGATIVE and isinstance(value, Tensor) and value.facts is not None:
                    lowest = value.facts.minimum
                    if lowest is not None and lowest < 0 and not value.dtype.startswith(("uint", "int")):
                        subject = facts.state.subject(value, optimizer.subject)
                        yield finding(
                            "invalid-optimizer",
                            subject,
                            f"{key} of parameter {state.key} is {lowest:g} somewhere; it is a mean of squares",
                        )

    @staticmethod
    def _vanished(facts: CheckpointFacts, optimizer: OptimizerState) -> Iterator[Finding]:
        if any(_decay(g.options) == 1.0 for g in optimizer.groups):
            return
        for state in optimizer.states:
            first, second = state.values.get("exp_avg"), state.values.get("exp_avg_sq")
            if not isinstance(first, Tensor) or not isinstance(second, Tensor) or not second.numel:
                continue
            largest = _largest(first)
            if (
                largest is not None
                and largest > SQUARABLE.get(second.dtype, math.inf)
                and second.facts is not None
                and second.facts.zeros
            ):
                yield finding(
                    "invalid-optimizer",
                    facts.state.subject(second, optimizer.subject),
                    f"exp_avg_sq of parameter {state.key} is zero everywhere, its exp_avg reaches {largest:.3g}: the squares of the same gradients cannot be zero",
                )

    @staticmethod
    def _steps(facts: CheckpointFacts, optimizer: OptimizerState) -> Iterator[Finding]:
        for state in optimizer.states:
            step = number(state.values.get("step"))
            if step is not None and (step < 0 or step != int(step)):
                value = state.values["step"]
                subject = (
                    facts.state.subject(value, optimizer.subject)
                    if isinstance(value, Tensor)
                    else optimizer.subject
                )
                yield finding(
                    "invalid-optimizer",
                    subject,
                    f"the step of parameter {state.key} is {step:g}; it counts whole steps",
                )

    @staticmethod
    def _empty(subject: Subject, optimizer: OptimizerState, place: int) -> Iterator[Finding]:
        facts = subject.facts
        step = stated_step(facts)
        if (
            optimizer.states
            or not step
            or not optimizer.groups
            or not any(g.params for g in optimizer.groups)
            or step == facts.state.skipped_steps  # a loss scaler that has not found its scale yet
        ):
            return
        before = subject.previous.state.optimizers if subject.previous is not None else ()
        if any(o.states for o in facts.state.optimizers) and not any(
            o.states for o in before[place : place + 1]
        ):
            return  # one of several, whose network is not trained yet: discriminators often begin late
        keeps_state = any("betas" in g.options or number(g.options.get("momentum")) for g in optimizer.groups)
        if keeps_state:
            yield finding(
                "invalid-optimizer",
                optimizer.subject,
                f"the optimizer holds no state at all at step {step}: it is not the one that was trained with",
            )


def _largest(tensor: Tensor) -> float | None:
    known = tensor.facts
    if known is None or known.minimum is None or known.maximum is None:
        return None
    return max(abs(known.minimum), abs(known.maximum))


def _decay(options: Mapping[str, Any]) -> float | None:
    """The decay of second moments: 1 keeps them at zero for ever."""
    betas = options.get("betas")
    return number(betas[1]) if isinstance(betas, list | tuple) and len(betas) > 1 else None


CHECK = OptimizerValues()

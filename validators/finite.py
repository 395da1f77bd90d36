from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptguard.codes import finding
from ckptguard.layouts._ranks import PADDING
from ckptguard.model import CheckpointFacts, Evidence, Finding, Tensor
from ckptguard.ports import Subject
from ckptguard.validators._values import numbers

MOST_STRETCHES = 4096


class Finite:
    """NaN and infinity in weights and optimizer state.

    Finds: any NaN, and any infinity in a tensor that training changes.
    Why it matters: from one NaN every later step is NaN; it spreads at the first forward pass.
    Example: a save between the overflow and the crash that it caused.
    What to do: resume from before the loss went bad.
    Blind spots: finite nonsense; types that have neither (integers, 8-bit states). Buffers that hold nothing but one
    number and infinity are masks, and masks are meant so. The padding of ZeRO-3's partitions was never filled.
    """

    name = "finite"
    needs = Evidence.CONTENT
    codes = ("nonfinite-weights", "nonfinite-optimizer")

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        for name, tensor in {**facts.state.ema, **facts.state.model}.items():
            if _is_bad(tensor) and not _is_mask(name, tensor) and not _is_constant(subject, name, tensor):
                yield finding(
                    "nonfinite-weights", facts.state.subject(tensor), f"{name} holds {_count(tensor)}"
                )
        for optimizer in facts.state.optimizers:
            for state in optimizer.states:
                for key, value in state.values.items():
                    if isinstance(value, Tensor) and _is_bad(value) and not _is_padding(subject, value):
                        yield finding(
                            "nonfinite-optimizer",
                            facts.state.subject(value, optimizer.subject),
                            f"{key} of parameter {state.key} holds {_count(value)}",
                        )


def _is_bad(tensor: Tensor) -> bool:
    return tensor.facts is not None and not tensor.facts.finite


def _is_padding(subject: Subject, tensor: Tensor) -> bool:
    """Whether all that is not finite lies where no parameter's numbers are."""
    stretches = subject.facts.state.attributes.get(PADDING, {}).get(id(tensor))
    if not stretches or subject.store is None or tensor.facts is None or len(stretches) > MOST_STRETCHES:
        return False
    bad = 0
    for start, numel in stretches:
        found = numbers(subject.store, subject.facts, tensor, start, numel)
        bad += 0 if found is None else int(np.count_nonzero(~np.isfinite(found)))
    return bad == tensor.facts.nan + tensor.facts.inf


def _count(tensor: Tensor) -> str:
    known = tensor.facts
    assert known is not None
    parts = [f"{n} {word}" for n, word in ((known.nan, "NaN"), (known.inf, "Inf")) if n]
    return " and ".join(parts) + f" in {tensor.numel} numbers"


def _is_mask(name: str, tensor: Tensor) -> bool:
    known, last = tensor.facts, name.rpartition(".")[2].lower()
    if known is None or known.nan or "scale" in last:
        return False
    # Nothing but infinity is no mask: a mask lets something through.
    one_number = known.minimum == known.maximum and (known.minimum is not None or tensor.numel == 1)
    return one_number or "mask" in last


def _is_constant(subject: Subject, name: str, tensor: Tensor) -> bool:
    """Infinity without NaN that is the same, bit for bit, in every other checkpoint: a buffer, not a parameter."""
    known = tensor.facts
    if known is None or known.nan:
        return False
    others = [
        o.facts for s in subject.others if (o := _model(s).get(name)) is not None and o.facts is not None
    ]
    return bool(others) and all(o.digest == known.digest for o in others)


def _model(facts: CheckpointFacts) -> dict[str, Tensor]:
    return dict(facts.state.model)


CHECK = Finite()

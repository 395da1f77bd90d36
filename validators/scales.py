from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding, Tensor
from ckptguard.ports import Store, Subject
from ckptguard.validators._values import numbers

INVERSE = "scale_inv"
SUFFIXES = ("_scale_inv", "_scale", ".scale_inv", ".scale")
NUMBERS = 64 << 10
APART = 0.01  # of 1: scale times its inverse, both rounded
MOST_REMOTE = 32


class Scales:
    """Whether the scales of eight-bit weights are such that weights can be made with them.

    Finds: scales of zero or below beside eight-bit weights that are not zero, and scales whose stored inverse is not theirs.
    Why it matters: every weight is multiplied by its scale: the first step looks right, and tens of steps later the loss explodes.
    Example: scales restored from a checkpoint, and their inverses left as they were at the start.
    What to do: take both from one save, or resume from the checkpoint before; calibrate anew if none has them.
    Blind spots: scales inside the opaque `_extra_state` of Transformer Engine; a wrong scale that is positive and has no inverse.
    """

    name = "scales"
    needs = Evidence.CONTENT
    codes = ("zero-weights", "mixed-saves")

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        yield from _not_positive(facts)
        if subject.store is None:
            return
        pairs = [
            (name, tensor, scale)
            for name, tensor in facts.state.model.items()
            if name.endswith(INVERSE)
            and (scale := facts.state.model.get(name.removesuffix("_inv"))) is not None
            and scale.shape == tensor.shape
        ]
        for name, inverse, scale in pairs[:MOST_REMOTE] if subject.store.traits.request_bytes else pairs:
            wrong = not_inverse(subject.store, facts, scale, inverse)
            if wrong is not None:
                yield finding(
                    "mixed-saves",
                    facts.state.subject(inverse),
                    f"{name} times its scale is {wrong:.4g}, and must be 1: the two are not of one save",
                )


def _not_positive(facts: CheckpointFacts) -> Iterator[Finding]:
    for name, weight in facts.state.model.items():
        if weight.facts is None or weight.facts.zeros or not weight.dtype.startswith("float8"):
            continue
        for suffix in SUFFIXES:
            scale = facts.state.model.get(name + suffix)
            known = scale.facts if scale is not None else None
            if scale is None or known is None or known.maximum is None or known.minimum is None:
                continue
            # A block of zeros may have a scale of zero; a negative one has no meaning, nor have zeros everywhere.
            if known.minimum < 0 or known.maximum <= 0:
                yield finding(
                    "zero-weights",
                    facts.state.subject(scale),
                    f"{name + suffix} is {known.minimum:.4g} {'everywhere' if known.minimum == known.maximum else 'somewhere'}: a scale is positive, and the weights it belongs to are not zero",
                )


def not_inverse(store: Store, facts: CheckpointFacts, scale: Tensor, inverse: Tensor) -> float | None:
    """The product farthest from 1, where it is too far; None where all fit or the numbers cannot be read."""
    one, two = numbers(store, facts, scale, 0, NUMBERS), numbers(store, facts, inverse, 0, NUMBERS)
    if one is None or two is None:
        return None
    products = one * two
    products = products[np.isfinite(products)]  # what is not finite is another check's business
    if not products.size:
        return None
    worst = float(products[np.argmax(np.abs(products - 1.0))])
    return worst if abs(worst - 1.0) > APART else None


CHECK = Scales()

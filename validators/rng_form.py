from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ckptguard.codes import finding
from ckptguard.model import Evidence, Finding, Tensor
from ckptguard.ports import Subject

TORCH_CPU_BYTES = 5056


class RngForm:
    """Whether saved random-generator states have the form that their generators can take.

    Finds: torch, Python and NumPy states of a wrong length or kind, and torch states that are all zero.
    Why it matters: dropout and data order continue from these; a state that is refused at load is often only logged.
    Example: an RNG file that was overwritten by another object.
    What to do: resume from another checkpoint where the exact continuation matters.
    Blind spots: a state of the right form from another step cannot be told from a right one without a seal.
    """

    name = "rng-form"
    needs = Evidence.STRUCTURE
    codes = ("rng-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        for rng in subject.facts.state.rngs:
            for name, value in rng.streams.items():
                fault = _fault(name, value)
                if fault:
                    yield finding(
                        "rng-mismatch", f"{rng.subject}:{name}", f"{rng.subject}: the {name} state {fault}"
                    )


def _fault(name: str, value: Any) -> str:
    plain = name.lower()
    if isinstance(value, Tensor) and ("cuda" not in plain and any(w in plain for w in ("torch", "cpu"))):
        if value.dtype != "uint8" or value.numel != TORCH_CPU_BYTES:
            return f"is {value.dtype} of {value.numel} elements, a CPU generator has {TORCH_CPU_BYTES} bytes"
        if value.value is not None and not np.asarray(value.value).any():
            return "is all zero, which no generator ever is"
    if (
        isinstance(value, tuple)
        and value
        and value[0] == 3
        and (len(value) != 3 or not isinstance(value[1], tuple) or len(value[1]) != 625)
    ):
        return "is no state of Python's generator (3, 625 numbers, None or a number)"
    if (
        isinstance(value, tuple)
        and value
        and value[0] == "MT19937"
        and (len(value) != 5 or getattr(value[1], "size", len(value[1])) != 624)
    ):
        return "is no state of NumPy's MT19937 (624 numbers)"
    return ""


CHECK = RngForm()

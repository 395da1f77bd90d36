from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ckptguard.codes import finding
from ckptguard.model import Evidence, Finding
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, number

COLLAPSED = 1e-8
MINIMUM = 1.0  # where a dynamic scale is given up as hopeless (DeepSpeed's min_scale)
FALL = 256.0


class Scaler:
    """Whether the loss scaler's state is one that training can go on from.

    Finds: a scale that is NaN, infinite, zero, negative or collapsed, one that fell to its minimum from far above in an
    earlier checkpoint, and a growth counter outside of its interval.
    Why it matters: such a scale makes every gradient overflow or vanish, and every step be skipped.
    Example: a run that died of NaN and saved once more before anybody looked.
    What to do: resume from before the scale began to fall.
    Blind spots: a scale reset to its default is a valid one.
    """

    name = "scaler"
    needs = Evidence.STRUCTURE
    codes = ("scaler-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        for scaler in subject.facts.state.scalers:
            values = scaler.values
            scale = _scale(values)
            if scale is not None and (not math.isfinite(scale) or scale < COLLAPSED):
                yield finding(
                    "scaler-mismatch",
                    scaler.subject,
                    f"the loss scale is {scale:g}: no step can be made with it",
                )
            elif scale is not None and scale <= MINIMUM and (height := self._height(subject)) >= FALL * scale:
                yield finding(
                    "scaler-mismatch",
                    scaler.subject,
                    f"the loss scale fell from {height:g} in an earlier checkpoint to {scale:g}: step after step overflowed, the training had died before it was saved",
                )
            tracker = number(values.get("_growth_tracker", values.get("growth_tracker")))
            interval = number(values.get("growth_interval"))
            if tracker is not None and (
                tracker < 0 or (interval is not None and tracker >= max(interval, 1))
            ):
                yield finding(
                    "scaler-mismatch",
                    scaler.subject,
                    f"the growth counter is {tracker:g}, its interval {interval or 0:g}",
                )

    @staticmethod
    def _height(subject: Subject) -> float:
        """The highest scale of the run's earlier checkpoints."""
        step = subject.facts.step
        scales = [
            scale
            for s in comparable(subject)
            if s.step is not None and step is not None and s.step < step
            for scaler in s.state.scalers
            if (scale := _scale(scaler.values)) is not None and math.isfinite(scale)
        ]
        return max(scales, default=0.0)


def _scale(values: Mapping[str, Any]) -> float | None:
    return number(values.get("scale", values.get("cur_scale", values.get("loss_scale"))))


CHECK = Scaler()

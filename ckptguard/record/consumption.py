"""What the coming step consumes: fingerprints of its micro-batches and, after a save, the batches themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptguard.record.batches import FixedBatches, StepBatches
from ckptguard.record.fingerprints import fingerprint, join_fingerprints
from ckptguard.record.guard import Once


@dataclass(frozen=True, slots=True)
class Consumed:
    """What one step consumed. `write` are the fixed batches that should be written now."""

    fingerprint: str | None
    waited: float
    write: FixedBatches | None


class Consumption:
    """Collects between two steps. `limit` and `budget` bound the batches that are kept after a save."""

    def __init__(self, limit: int, budget: int) -> None:
        self._limit, self._budget = limit, budget
        self._fingerprints: list[str] = []
        self._micro_batches: list[Any] = []
        self._waited = 0.0
        self._fixed: FixedBatches | None = None
        self._try_fingerprint = Once("batch fingerprints")
        self.try_batches = Once("fixed batches")

    def add(self, batch: Any, waited: float, known: str | None) -> None:
        """Note a micro-batch; `known` is its fingerprint where someone computed it already."""
        self._waited += waited
        mark = known if known is not None else self._try_fingerprint(lambda: fingerprint(batch))
        if mark is None:
            return  # Not in host memory: keeping the batch would wait for the device as well.
        self._fingerprints.append(mark)
        if self._fixed is not None and not self._fixed.full and batch is not None:
            self._micro_batches.append(batch)

    def take(self, step: int) -> Consumed:
        """What was noted since the step before."""
        mark, waited, micro = join_fingerprints(self._fingerprints), self._waited, tuple(self._micro_batches)
        self._fingerprints, self._micro_batches, self._waited = [], [], 0.0
        fixed = self._fixed
        if fixed is None or fixed.full or not micro:
            return Consumed(mark, waited, None)
        kept = self.try_batches(lambda: fixed.add(StepBatches(step, micro, mark)))
        # Written again at 1, 2, 4, 8 steps: a run that is killed soon leaves what there was, at twice the writing.
        due = fixed.full or len(fixed.steps) & (len(fixed.steps) - 1) == 0
        return Consumed(mark, waited, fixed if kept and due else None)

    def begin(self, checkpoint: str) -> bool:
        """Start to keep the batches that follow a save; whether that is wanted."""
        self._micro_batches = []
        wanted = self._limit > 0 and not self.try_batches.off
        self._fixed = FixedBatches(checkpoint, self._limit, self._budget) if wanted else None
        return wanted

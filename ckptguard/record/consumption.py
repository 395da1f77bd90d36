"""What the coming step consumes: fingerprints of its micro-batches and, after a save, the batches themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptguard.record.batches import FixedBatches, StepBatches, copied
from ckptguard.record.fingerprints import fingerprint, join_fingerprints
from ckptguard.record.guard import Once


@dataclass(frozen=True, slots=True)
class Consumed:
    """What one step consumed. `write` are the fixed batches that should be written now."""

    fingerprint: str | None
    waited: float
    write: tuple[FixedBatches, ...]


class Consumption:
    """Collects between two steps. `limit` and `budget` bound what is kept after each save."""

    def __init__(self, limit: int, budget: int) -> None:
        self._limit, self._budget = limit, budget
        self._fingerprints: list[str] = []
        self._micro_batches: list[Any] = []
        self._waited = 0.0
        # More than one where saves follow each other within `limit` steps.
        self._open: list[FixedBatches] = []
        self._try_fingerprint = Once("batch fingerprints")
        self.try_batches = Once("fixed batches")

    def add(self, batch: Any, waited: float, known: str | None) -> None:
        """Note a micro-batch; `known` is its fingerprint where someone computed it already."""
        self._waited += waited
        mark = known if known is not None else self._try_fingerprint(lambda: fingerprint(batch))
        if mark is None:
            return  # Not in host memory: keeping the batch would wait for the device as well.
        self._fingerprints.append(mark)
        if self._open and batch is not None:
            self._micro_batches.append(batch)

    def take(self, step: int) -> Consumed:
        """What was noted since the step before."""
        mark, waited, micro = join_fingerprints(self._fingerprints), self._waited, tuple(self._micro_batches)
        self._fingerprints, self._micro_batches, self._waited = [], [], 0.0
        due = self.try_batches(lambda: self._keep(step, micro, mark)) if micro else None
        return Consumed(mark, waited, tuple(due or ()))

    def _keep(self, step: int, micro: tuple[Any, ...], mark: str | None) -> list[FixedBatches]:
        batches = copied(StepBatches(step, micro, mark))
        due = []
        for fixed in self._open:
            kept = fixed.add(batches)
            # Written at 1, 2, 4, 8 steps: a run that is killed soon leaves what there was, at twice the writing.
            if kept and (fixed.full or fixed.count & (fixed.count - 1) == 0):
                due.append(fixed)
        self._open = [fixed for fixed in self._open if not fixed.full]
        return due

    def begin(self, checkpoint: str) -> bool:
        """Start to keep the batches that follow a save; whether that is wanted."""
        if self._limit <= 0 or self.try_batches.off:
            return False
        self._open = [fixed for fixed in self._open if fixed.checkpoint != checkpoint]
        self._open.append(FixedBatches(checkpoint, self._limit, self._budget))
        return True

    def unfinished(self) -> list[FixedBatches]:
        """Those that hold steps and still wait for more, when nothing more will come."""
        return [fixed for fixed in self._open if fixed.count]

"""The recipe of the demo's training: what `ckptguard restore --recipe` needs to restore and replay it.

ckptguard restore RUN/step-80.pt --recipe ckptguard.demo.recipe:Recipe
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptguard.demo import training
from ckptguard.record import fingerprint


class Recipe:
    """Builds the parts as the training does, and does one step as the training does."""

    def build(self, device: str) -> dict[str, Any]:
        return training.build(device)

    def step(self, parts: dict[str, Any]) -> dict[str, Any]:
        batch = parts["dataloader"].next()
        return {**training.train_step(parts, batch), "batch": fingerprint(batch)}

    def step_on(self, parts: dict[str, Any], batches: Sequence[Any]) -> dict[str, Any]:
        (batch,) = batches
        return {**training.train_step(parts, batch), "batch": fingerprint(batch)}

    def probe(self, parts: dict[str, Any]) -> float:
        return float(training.probe_loss(parts))

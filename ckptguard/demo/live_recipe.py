"""The recipe of the training that `ckptguard demo --serve` watches: that of the demo, with its longer schedule."""

from __future__ import annotations

from typing import Any

from ckptguard.demo import training
from ckptguard.demo.live import STEPS
from ckptguard.demo.recipe import Recipe


class LiveRecipe(Recipe):
    """Builds the parts as `ckptguard.demo.live` does."""

    def build(self, device: str) -> dict[str, Any]:
        return training.build(device, steps=STEPS)

"""Real text that is on every machine: the standard library's own sources, in a shuffled loader that can be resumed."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

TEXT_BYTES = 2_000_000


def read_text(size: int = TEXT_BYTES) -> np.ndarray:
    """The first bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += module.read_bytes()
        if len(text) >= size:
            break
    return np.frombuffer(bytes(text[:size]), np.uint8)


class TextLoader:
    """Batches of windows of the text, in another order every epoch, for ever. Knows where it stands, and can go there."""

    def __init__(self, text: np.ndarray, *, context: int, batch: int, seed: int = 0) -> None:
        self._text, self._length, self._batch, self._seed = text, context + 1, batch, seed
        self.epoch = 0
        self.position = 0
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray:
        windows = len(self._text) // self._length
        return np.random.default_rng((self._seed, self.epoch)).permutation(windows)

    def __len__(self) -> int:
        return len(self._order) // self._batch

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.next()

    def next(self) -> Tensor:
        """The next batch, as int64 of (batch, context + 1)."""
        if self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._shuffled()
        rows = self._order[self.position * self._batch : (self.position + 1) * self._batch]
        self.position += 1
        windows = np.stack([self._text[row * self._length : (row + 1) * self._length] for row in rows])
        return torch.from_numpy(windows.astype(np.int64))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self._seed = state["epoch"], state["position"], state["seed"]
        self._order = self._shuffled()

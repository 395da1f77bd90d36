"""A data loader that tells what is consumed from it, when it is consumed, and is otherwise the loader itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any


class WatchedLoader:
    """Iterates a loader and hands each batch to `consumed(batch, seconds waited)` at the moment it is given out.

    Never looks ahead: a prefetching or stateful loader would be disturbed. Everything else (length, sampler,
    `state_dict`) is the loader's own.
    """

    def __init__(self, loader: Any, consumed: Callable[[Any, float], None]) -> None:
        self._loader = loader
        self._consumed = consumed

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._consumed(batch, time.perf_counter() - began)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

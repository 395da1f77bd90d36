"""A data loader that tells what is consumed from it, when it is consumed, and is otherwise the loader itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from ckptguard.record.feed import Feed

Consumed = Callable[..., None]
"""Called with a batch, the seconds waited for it, and its fingerprint where that is known."""


class WatchedLoader:
    """Iterates a loader and hands each batch to `consumed(batch, seconds waited)` at the moment it is given out.

    Never looks ahead: a prefetching or stateful loader would be disturbed. Everything else (length, sampler,
    `state_dict`) is the loader's own.
    """

    def __init__(self, loader: Any, consumed: Consumed) -> None:
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
        if name == "_loader":  # While it is being copied or unpickled it has none.
            raise AttributeError(name)
        return getattr(self._loader, name)


def on_host(loader: Any, consumed: Consumed) -> Consumed:
    """What to tell of a loader that gives its batches out on a device (accelerate's): the batches as they were before.

    Other loaders' batches are told as they come.
    """
    if getattr(loader, "base_dataloader", None) is None or getattr(loader, "device", None) is None:
        return consumed
    feed = Feed()
    feed.attach(loader)
    skipped = int(getattr(loader, "skip_batches", 0) or 0)

    def tell(batch: Any, waited: float) -> None:
        nonlocal skipped
        # What it fast-forwards over was put together and moved as well.
        feed.take(skipped)
        skipped = 0
        taken = feed.take(1)
        mark, before = taken[0] if taken else (None, batch)
        consumed(before, waited, mark)

    return tell

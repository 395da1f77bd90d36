"""Batches of a trainer that hides its loop: fingerprinted where they are put together, counted where they are consumed.

A trainer's callbacks see no batch, and looking into its loader would draw from it. So the collate function is wrapped:
it may run in a worker process, so the fingerprint travels with the batch; and it is noted in the main process when the
batch is moved to its device, which the trainer does in the order of consumption, one batch ahead.
"""

from __future__ import annotations

import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ckptguard.record.fingerprints import fingerprint

# How a batch that comes back from a worker process finds the feed that waits for it.
_FEEDS: weakref.WeakValueDictionary[str, Feed] = weakref.WeakValueDictionary()


class MarkedBatch(dict[str, Any]):
    """A batch with its fingerprint, until it is moved; then the note is handed in and a batch is all it is."""

    mark: str | None = None
    feed: str | None = None

    def to(self, *args: Any, **kwargs: Any) -> MarkedBatch:
        """The batch on another device, as the tokenizer's own batches have it."""
        feed = _FEEDS.get(self.feed) if self.feed is not None else None
        if feed is not None and self.mark is not None:
            feed.arrived.append((self.mark, dict(self)))
        self.feed = None
        return MarkedBatch(
            {key: value.to(*args, **kwargs) if hasattr(value, "to") else value for key, value in self.items()}
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class MarkingCollator:
    """The collate function it wraps, with every batch that is a mapping marked. Survives being sent to a worker."""

    def __init__(self, collate: Callable[[Any], Any], feed: str) -> None:
        self.collate = collate
        self.feed = feed

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        if not isinstance(batch, Mapping):
            return batch
        marked = MarkedBatch(batch)
        try:
            marked.mark, marked.feed = fingerprint(marked), self.feed
        except Exception:  # noqa: BLE001 - a batch that cannot be fingerprinted is still the batch to train on
            marked.mark = None
        return marked


class Feed:
    """What a loader gives out, in order. `take` is called by the one who knows how many batches a step consumed."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.arrived: deque[tuple[str, dict[str, Any]]] = deque()
        self._loader: Any = None

    def attach(self, loader: Any) -> None:
        """Wrap the loader's collate function; the workers must not have been started."""
        _FEEDS[self.name] = self
        # Accelerate puts its own loader around torch's, and makes new ones from the attributes of the inner.
        inner = getattr(loader, "base_dataloader", loader)
        inner.collate_fn = MarkingCollator(inner.collate_fn, self.name)
        self._loader = inner

    def detach(self) -> None:
        """Put the loader's own collate function back, and take no more notes."""
        if self._loader is not None and isinstance(self._loader.collate_fn, MarkingCollator):
            self._loader.collate_fn = self._loader.collate_fn.collate
        self._loader = None
        # Batches that are still on their way find nobody who would keep them.
        _FEEDS.pop(self.name, None)
        self.arrived.clear()

    def take(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        """The next batches, as (fingerprint, batch); [] when there are not that many, as then their order is unknown."""
        if len(self.arrived) < count:
            self.arrived.clear()
            return []
        return [self.arrived.popleft() for _ in range(count)]

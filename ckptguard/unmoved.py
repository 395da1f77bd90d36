"""Whether all weights are still those of the checkpoint before, found out with little reading.

`preflight` reads the newest checkpoint whole and the one before by its structure alone. Where the training moved, the first
window of the first weight differs and that is the end of it; only where nothing does, more is read. Single weights at rest
among moving ones are left to `audit`: two checkpoints cannot tell them from frozen layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckptguard.errors import FormatError, StoreError, TimedOut
from ckptguard.formats import Parsed, Source, dcp_items
from ckptguard.layouts._state import strip_wrappers
from ckptguard.model import CheckpointFacts, Evidence, Finding, Tensor
from ckptguard.ports import Store, Subject
from ckptguard.registry import checks
from ckptguard.storage.timed import TimeIsUp

CODE = "frozen-weights"
METADATA = ".metadata"
WINDOW = 4096
PIECE = 4 << 20
Place = tuple[str, int, int]
"""Key in the store, first byte, bytes."""


def unmoved_weights(subject: Subject, before: CheckpointFacts) -> list[Finding]:
    """What the check of the weights' history says of a checkpoint that was read whole, and one before that was not.

    Raises TimedOut when the store's time limit is reached. What cannot be read of the one before accuses nobody.
    """
    now, store = subject.facts, subject.store
    if store is None or now.evidence < Evidence.CONTENT or before.evidence >= Evidence.CONTENT:
        return []
    known = _with_weights(store, before, now)
    if known is None:
        return []
    both = replace(subject, siblings=(now, known))
    return [found for check in checks() if CODE in check.codes for found in check.run(both)]


def _with_weights(store: Store, before: CheckpointFacts, now: CheckpointFacts) -> CheckpointFacts | None:
    """The checkpoint before with the facts of the other's weights, where all of them are the same; else None."""
    old = {strip_wrappers(name): (name, tensor) for name, tensor in before.state.model.items()}
    pairs = {
        old[key][0]: (old[key][1], tensor)
        for name, tensor in now.state.model.items()
        if (key := strip_wrappers(name)) in old and tensor.facts is not None
    }
    one, two = _Places(store, before), _Places(store, now)
    for window in (WINDOW, None):
        if not pairs or not all(_equal(one, mine, two, theirs, window) for mine, theirs in pairs.values()):
            return None
    model = dict(before.state.model) | {
        name: replace(mine, facts=theirs.facts) for name, (mine, theirs) in pairs.items()
    }
    return replace(before, state=replace(before.state, model=model))


class _Places:
    """Where the bytes of a checkpoint's tensors lie, looked up only for those that are asked for."""

    def __init__(self, store: Store, facts: CheckpointFacts) -> None:
        self.store, self.facts = store, facts
        self._chunks: dict[str, list[tuple[str, tuple[str, object]]]] = {}
        for file, known in facts.files.items():
            for name, offsets in known.details.get("chunks", {}):
                self._chunks.setdefault(name, []).append((file, (name, offsets)))
        self._items: dict[str, Mapping[Any, Tensor]] = {}

    def of(self, tensor: Tensor) -> dict[object, Place]:
        """By the part of the tensor; empty where its place is not known."""
        if tensor.start is not None:
            key = self._key(self.facts.state.subject(tensor).partition(":")[0])
            return {(): (key, tensor.start, tensor.nbytes)} if key else {}
        found: dict[object, Place] = {}
        for file, part in self._chunks.get(tensor.storage or tensor.name, ()):
            chunk, key = self._placed(file).get(part), self._key(file)
            if chunk is None or chunk.start is None or not key:
                return {}
            found[() if chunk.shape == tensor.shape else part[1]] = (key, chunk.start, chunk.nbytes)
        return found

    def _placed(self, file: str) -> Mapping[Any, Tensor]:
        """The chunks of a shard with their places: each is an archive with a directory of its own, read at need."""
        if file not in self._items:
            self._items[file] = self._read(file)
        return self._items[file]

    def _read(self, file: str) -> Mapping[Any, Tensor]:
        known: Mapping[Any, Tensor] = self.facts.files[file].details.get("chunks", {})
        index = next((f for name, f in self.facts.files.items() if name.endswith(METADATA)), None)
        entry = self.facts.manifest.file(file)
        if index is None or entry is None or all(t.start is not None for t in known.values()):
            return known
        source = Source(self.store, entry.entry.source, entry.entry.size, deep=True)
        try:
            parsed = dcp_items.read(source, file, {index.name: Parsed(index.kind, index.tree)})
        except TimeIsUp:
            raise
        except (FormatError, StoreError):
            return known
        placed: Mapping[Any, Tensor] = parsed.details.get("chunks", {})
        return placed

    def _key(self, file: str) -> str | None:
        entry = self.facts.manifest.file(file)
        return None if entry is None else entry.entry.source


def _equal(one: _Places, mine: Tensor, two: _Places, theirs: Tensor, window: int | None) -> bool:
    """Whether the bytes of two tensors are the same, each part of them up to `window`."""
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return False
    try:
        here, there = one.of(mine), two.of(theirs)
        return (
            bool(here)
            and _sizes(here) == _sizes(there)
            and all(_same_bytes(one.store, place, there[part], window) for part, place in here.items())
        )
    except TimeIsUp as error:
        raise TimedOut(
            f"the time limit was reached while the weights of {two.facts.path} were compared with those before",
            "give it more time (--timeout), or less to do: --depth structure",
        ) from error
    except StoreError:
        return False


def _sizes(places: Mapping[object, Place]) -> dict[object, int]:
    return {part: length for part, (_, _, length) in places.items()}


def _same_bytes(store: Store, one: Place, two: Place, window: int | None) -> bool:
    length = min(one[2], window or one[2])
    read: Callable[[Place, int, int], bytes] = lambda place, at, n: store.read(place[0], place[1] + at, n)  # noqa: E731
    return all(
        read(one, at, n) == read(two, at, n)
        for at in range(0, length, PIECE)
        for n in (min(PIECE, length - at),)
    )

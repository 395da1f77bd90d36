"""Weights that may still be those of the checkpoint before, found out with little reading: most differ at their beginning.

`preflight` reads the newest checkpoint whole and the one before by its structure alone. That weights did not move since shows
in the bytes of both, and is looked for here: a small window of each tensor, and more only of those that are equal there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

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
MOST_REQUESTS = 64
"""Where a request costs more than bytes: of larger models it is only asked whether all weights are the old ones."""

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
    """The checkpoint before with facts of those weights that the other has still; None where that leaves nothing to say."""
    old = {strip_wrappers(name): (name, tensor) for name, tensor in before.state.model.items()}
    pairs = {
        old[key][0]: (old[key][1], tensor)
        for name, tensor in now.state.model.items()
        if (key := strip_wrappers(name)) in old and tensor.facts is not None
    }
    costly = store.traits.request_bytes > 0 and len(pairs) > MOST_REQUESTS
    if not store.traits.request_bytes:
        before = _with_items(store, before)
    alike: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (mine, theirs) in pairs.items():
        if _equal(store, (before, mine), (now, theirs), WINDOW):
            alike[name] = mine, theirs
        elif costly:
            return None
    states = sum(len(optimizer.states) for optimizer in now.state.optimizers)
    if not alike or (len(alike) < len(pairs) and states != len(now.state.model)):
        return None  # what is neither all nor known to be trained accuses nobody
    model = dict(before.state.model)
    for name, (mine, theirs) in alike.items():
        if _equal(store, (before, mine), (now, theirs), None):
            model[name] = replace(mine, facts=theirs.facts)
    return replace(before, state=replace(before.state, model=model))


def _with_items(store: Store, before: CheckpointFacts) -> CheckpointFacts:
    """A distributed checkpoint with the places of its items, each of which is an archive with a directory of its own."""
    index = next((f for name, f in before.files.items() if name.endswith(METADATA)), None)
    shards = {name: f for name, f in before.files.items() if f.kind == "dcp-shard"}
    if index is None or not shards:
        return before
    files = dict(before.files)
    for name, facts in shards.items():
        entry = before.manifest.file(name)
        if entry is None or all(t.start is not None for t in facts.details.get("chunks", {}).values()):
            continue
        source = Source(store, entry.entry.key, entry.entry.size, deep=True)
        try:
            parsed = dcp_items.read(source, name, {index.name: Parsed(index.kind, index.tree)})
        except TimeIsUp:
            raise
        except (FormatError, StoreError):
            continue
        files[name] = replace(facts, details={**facts.details, "chunks": parsed.details.get("chunks", {})})
    return replace(before, files=files)


def _equal(
    store: Store,
    one: tuple[CheckpointFacts, Tensor],
    two: tuple[CheckpointFacts, Tensor],
    window: int | None,
) -> bool:
    """Whether the bytes of two tensors are the same, each part of them up to `window`."""
    a, b = one[1], two[1]
    mine, theirs = dict(_places(*one)), dict(_places(*two))
    if not mine or (a.dtype, a.shape) != (b.dtype, b.shape) or _sizes(mine) != _sizes(theirs):
        return False
    try:
        return all(_same_bytes(store, place, theirs[part], window) for part, place in mine.items())
    except TimeIsUp as error:
        raise TimedOut(
            f"the time limit was reached while the weights of {two[0].path} were compared with those before",
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


def _places(facts: CheckpointFacts, tensor: Tensor) -> Iterator[tuple[object, Place]]:
    """Where the tensor's bytes lie, by the part of it; nothing where that is not known."""
    if tensor.start is not None:
        file = facts.state.subject(tensor).partition(":")[0]
        if (key := _key(facts, file)) is not None:
            yield (), (key, tensor.start, tensor.nbytes)
        return
    whole = tensor.storage or tensor.name
    for file, known in facts.files.items():
        for (name, offsets), chunk in known.details.get("chunks", {}).items():
            if name == whole and chunk.start is not None and (key := _key(facts, file)) is not None:
                part = () if chunk.shape == tensor.shape else offsets
                yield part, (key, chunk.start, chunk.nbytes)


def _key(facts: CheckpointFacts, file: str) -> str | None:
    entry = facts.manifest.file(file)
    if entry is None:
        return None
    return entry.entry.resolved if entry.entry.kind == "link" and entry.entry.resolved else entry.entry.key

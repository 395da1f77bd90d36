"""The content of a DCP directory put together again: chunks from all shards, nested as the state dictionary was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ckptguard.formats.dcp_metadata import RANK_METADATA, Chunk, Index, TensorEntry, merge
from ckptguard.model import FileFacts, Tensor, TensorFacts

METADATA = ".metadata"


@dataclass(slots=True)
class Content:
    """Everything that the items of one DCP directory hold, by name. `files` says in which shard a name lies.

    An object that could not be read is None.
    `replicas` are the copies of what several ranks wrote, each with its shard. `index` is None where no metadata could be read; then nothing else is known either.
    """

    index: Index | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    prefix: str = ""
    replicas: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def path(self, name: str) -> tuple[Any, ...]:
        """A name's place in the saved state dictionary; the name itself where that was not recorded."""
        assert self.index is not None
        entry = self.index.tensors.get(name)
        return (entry.path if entry is not None else self.index.objects.get(name, ())) or (name,)

    def tree(self) -> dict[Any, Any]:
        """The state dictionary as it was saved: nested by the planner's paths, lists as lists again."""
        root: dict[Any, Any] = {}
        for name, value in (*self.tensors.items(), *self.objects.items()):
            *above, last = self.path(name)
            here = root
            for part in above:
                inner = here.setdefault(part, {})
                here = inner if isinstance(inner, dict) else {}
            here[last] = value
        return {key: _listed(value) for key, value in root.items()}


def index_of(files: Mapping[str, FileFacts], prefix: str = "") -> Index | None:
    """The index of a DCP directory, the ranks' joined where it was written without collectives."""
    main = files.get(prefix + METADATA)
    if main is not None:
        return main.tree if isinstance(main.tree, Index) else None
    ranks = [
        f.tree
        for name, f in files.items()
        if name.startswith(prefix) and RANK_METADATA.match(name[len(prefix) :]) and isinstance(f.tree, Index)
    ]
    return merge(ranks) if ranks else None


def read_dcp(files: Mapping[str, FileFacts], prefix: str = "") -> Content:
    """Put the chunks of all shards below `prefix` ("" or "optimizer_0/") together. Never raises for what is missing."""
    index = index_of(files, prefix)
    content = Content(index, prefix=prefix)
    if index is None:
        return content
    held: dict[tuple[str, Any], list[tuple[str, Tensor]]] = {}
    for shard in index.items:
        facts = files.get(prefix + shard)
        if facts is None:
            content.missing.append(shard)
            continue
        for key, tensor in facts.details.get("chunks", {}).items():
            held.setdefault(key, []).append((prefix + shard, tensor))
        if isinstance(facts.tree, dict) and facts.kind == "dcp-shard":
            for name in facts.tree.keys() & content.objects.keys():
                content.replicas.append((content.files[name], {name: content.objects[name]}))
                content.replicas.append((prefix + shard, {name: facts.tree[name]}))
            for name, value in facts.tree.items():
                content.files.setdefault(name, prefix + shard)
                content.objects.setdefault(name, value)
    for (name, _), places in held.items():
        for file, tensor in places if len(places) > 1 else ():
            if tensor.facts is not None:
                content.replicas.append((file, {name: tensor.facts.digest}))
    placed = {item.name: shard for shard, items in index.items.items() for item in items}
    for name in index.objects:
        # What could not be read (compressed, or in a shard that is gone) was saved all the same.
        content.objects.setdefault(name, None)
        content.files.setdefault(name, prefix + placed.get(name, METADATA))
    for name, entry in index.tensors.items():
        parts = [
            (chunk, *held[name, chunk.offsets][0]) for chunk in entry.chunks if (name, chunk.offsets) in held
        ]
        tensor, file = join_chunks(entry, parts)
        content.tensors[name] = tensor
        content.files[name] = file or prefix + placed.get(name, METADATA)
    return content


def join_chunks(entry: TensorEntry, parts: list[tuple[Chunk, str, Tensor]]) -> tuple[Tensor, str]:
    """The whole tensor of its chunks, with their facts joined, and the shard to name in findings."""
    if len(parts) == 1 and parts[0][2].shape == entry.shape:
        return parts[0][2], parts[0][1]
    whole = Tensor(
        entry.name, entry.dtype, entry.shape, nbytes=sum(t.nbytes for _, _, t in parts), storage=entry.name
    )
    facts = [(chunk, tensor.facts) for chunk, _, tensor in parts if chunk.numel]
    known = [(c, f) for c, f in facts if f is not None]
    if known and len(known) == len(facts) == sum(1 for c in entry.chunks if c.numel):
        whole.facts = _joined_facts(known)
    bad = next((file for _, file, t in parts if t.facts is not None and not t.facts.finite), "")
    return whole, bad or (parts[0][1] if parts else "")


def _joined_facts(parts: list[tuple[Chunk, TensorFacts]]) -> TensorFacts:
    parts = sorted(parts, key=lambda p: p[0].offsets)
    digest = xxhash.xxh3_128_hexdigest("".join(f"{c.offsets}{c.sizes}{f.digest}" for c, f in parts).encode())
    low = [f.minimum for _, f in parts if f.minimum is not None]
    high = [f.maximum for _, f in parts if f.maximum is not None]
    norms = [f.norm for _, f in parts if f.norm is not None]
    return TensorFacts(
        digest,
        sum(f.nbytes for _, f in parts),
        sum(f.nan for _, f in parts),
        sum(f.inf for _, f in parts),
        min(low, default=None),
        max(high, default=None),
        math.hypot(*norms) if norms else None,
        all(f.zeros for _, f in parts),
    )


def _listed(value: Any) -> Any:
    """Dictionaries whose keys are 0, 1, 2, ... as the lists that the planner took apart."""
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(v) for key, v in value.items()}
    if inner and all(type(key) is int for key in inner) and sorted(inner) == list(range(len(inner))):
        return [inner[i] for i in range(len(inner))]
    return inner

"""DCP's `.metadata`: one pickle that says which tensor lies where (torch/distributed/checkpoint/metadata.py, filesystem.py).

It is read by our own pickle reader and turned into plain data. Written without collectives there is one `__R.metadata`
for each rank, which lists what this rank wrote; `merge` makes one index of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptguard.errors import FormatError
from ckptguard.formats._base import Parsed, Source
from ckptguard.formats.bare_pickle import MAX_PICKLE
from ckptguard.formats.pickles import Opaque, read_pickle
from ckptguard.formats.reconstruct import dtype_of
from ckptguard.model import GlobalUse, Problem

Box = tuple[int, ...]
# The classes that every `.metadata` is made of; they hold fields and do nothing (megatron-core adds its planner's).
OWN_CLASSES = frozenset(
    f"torch.distributed.checkpoint.{name}"
    for name in (
        "metadata.Metadata", "metadata.MetadataIndex", "metadata.TensorStorageMetadata", "metadata.BytesStorageMetadata",
        "metadata.ChunkStorageMetadata", "metadata.TensorProperties", "metadata.StorageMeta", "filesystem._StorageInfo",
        "planner.SavePlan", "planner.WriteItem", "planner.TensorWriteData", "planner.BytesIOWriteData",
    )
) | {
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
}  # fmt: skip
TENSOR_CLASS = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"
BYTES_CLASS = "torch.distributed.checkpoint.metadata.BytesStorageMetadata"
METADATA_CLASSES = frozenset(
    {
        "torch.distributed.checkpoint.metadata.Metadata",
        "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
    }
)
RANK_METADATA = re.compile(r"^__(\d+)\.metadata$")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: where it begins in each dimension, and how far it reaches."""

    offsets: Box
    sizes: Box

    @property
    def numel(self) -> int:
        count = 1
        for extent in self.sizes:
            count *= extent
        return count


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What the index says of one tensor. `path` is its place in the state dictionary, () where that was not kept."""

    name: str
    dtype: str
    shape: Box
    chunks: tuple[Chunk, ...]
    path: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """A stretch of a shard that holds one chunk of a tensor, or one pickled object (`chunk` None)."""

    name: str
    file: str
    offset: int
    length: int
    chunk: Chunk | None = None
    dtype: str = ""
    transforms: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def label(self) -> str:
        """The name for findings: with the chunk's place where the tensor is stored in several."""
        if self.chunk is None or not any(self.chunk.offsets):
            return self.name
        return (
            f"{self.name}[{','.join(f'{o}:{o + s}' for o, s in zip(self.chunk.offsets, self.chunk.sizes))}]"
        )


@dataclass(frozen=True, slots=True)
class Index:
    """The whole `.metadata`. `items` are grouped by shard, in the order of their offsets.

    `unplaced` are chunks of `tensors`, or objects, for which no place in a shard is recorded; `unknown` are places
    recorded for something that the index does not describe. `save_id` is the same in all that one save wrote.
    """

    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, tuple[Any, ...]]
    items: Mapping[str, tuple[Item, ...]]
    unplaced: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    save_id: str = ""
    version: str = ""
    checkpoint_id: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)

    def names(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.objects


def read(source: Source) -> Parsed:
    """Read `.metadata`. The tree is an `Index`, or None where the pickle holds something else.

    Raises FormatError, StoreError.
    """
    if source.size > MAX_PICKLE:
        raise FormatError("bad-header", f"{source.size} bytes are too many for DCP's metadata")
    data = source.read(0, source.size)
    pickled = read_pickle(data)
    problems = []
    if pickled.end != len(data):
        problems.append(Problem("bad-header", "", f"the pickle ends at byte {pickled.end} of {len(data)}"))
    index: Index | None = None
    try:
        index = build_index(pickled.value)
    except FormatError as e:
        # A payload may stand where the metadata should: the names it calls must be kept.
        problems.append(Problem(e.code, "", str(e)))
    uses = tuple(
        GlobalUse(u.name, "allowed") if u.how == "built" and u.name in OWN_CLASSES else u
        for u in pickled.globals
    )
    return Parsed("dcp-metadata", index, (), tuple(dict.fromkeys(uses)), tuple(problems))


def build_index(tree: Any) -> Index:
    """The index from the unbuilt `Metadata` object. Raises FormatError where its fields are not what they must be."""
    if not isinstance(tree, Opaque) or tree.name not in METADATA_CLASSES:
        raise FormatError("bad-header", f"the pickle holds {_kind(tree)} where DCP's Metadata belongs")
    described = tree.get("state_dict_metadata")
    stored = tree.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise FormatError(
            "bad-header",
            "the Metadata lacks state_dict_metadata or storage_data: it is of no version of DCP that we know",
        )
    paths = tree.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, tuple[Any, ...]] = {}
    for name, entry in described.items():
        path = paths.get(name)
        path = tuple(path) if isinstance(path, tuple | list) else ()
        kind = entry.name if isinstance(entry, Opaque) else ""
        if kind == TENSOR_CLASS:
            tensors[str(name)] = _tensor(str(name), entry, path)
        elif kind == BYTES_CLASS:
            objects[str(name)] = path
        else:
            raise FormatError(
                "bad-header", f"{str(name)[:80]} is described by {_kind(entry)[:80]}, which DCP does not know"
            )
    items, unplaced, unknown = _items(stored, tensors, objects)
    meta = tree.get("storage_meta")
    described_by = meta if isinstance(meta, Opaque) else Opaque("")
    extras = {key: tree.get(key) for key in ("mcore_data",) if tree.get(key) is not None}
    if tree.get("all_local_plans") is not None:
        extras["all_local_plans"] = True
    return Index(
        tensors,
        objects,
        items,
        unplaced,
        unknown,
        save_id=_word(described_by.get("save_id")),
        version=_word(tree.get("version")),
        checkpoint_id=_word(described_by.get("checkpoint_id")),
        extras=extras,
    )


def merge(indexes: Iterable[Index]) -> Index:
    """One index of those that several ranks wrote without collectives. What all hold is in it once."""
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, tuple[Any, ...]] = {}
    items: dict[str, tuple[Item, ...]] = {}
    extras: dict[str, Any] = {}
    unplaced: list[str] = []
    unknown: list[str] = []
    first: Index | None = None
    for index in indexes:
        first = first or index
        for name, entry in index.tensors.items():
            known = tensors.get(name)
            chunks = tuple(dict.fromkeys((*known.chunks, *entry.chunks))) if known else entry.chunks
            tensors[name] = TensorEntry(name, entry.dtype, entry.shape, chunks, entry.path)
        objects.update(index.objects)
        items.update(index.items)
        extras.update(index.extras)
        unplaced += index.unplaced
        unknown += index.unknown
    if first is None:
        return Index({}, {}, {})
    return Index(
        tensors,
        objects,
        items,
        tuple(unplaced),
        tuple(unknown),
        first.save_id,
        first.version,
        first.checkpoint_id,
        extras,
    )


def _tensor(name: str, entry: Opaque, path: tuple[Any, ...]) -> TensorEntry:
    properties = entry.get("properties")
    dtype: Any = None
    if isinstance(properties, Opaque):
        state = properties.state
        dtype = state[0] if isinstance(state, tuple) and state else properties.get("dtype")
    chunks = entry.get("chunks")
    kind = dtype_of(dtype)
    if kind is None or not isinstance(chunks, list):
        raise FormatError("bad-header", f"{name}: its dtype or its list of chunks is damaged")
    return TensorEntry(
        name, kind, _box(name, entry.get("size")), tuple(_chunk(name, c) for c in chunks), path
    )


def _chunk(name: str, value: Any) -> Chunk:
    if not isinstance(value, Opaque):
        raise FormatError("bad-header", f"{name}: one of its chunks is {_kind(value)}")
    return Chunk(_box(name, value.get("offsets")), _box(name, value.get("sizes")))


def _box(name: str, value: Any) -> Box:
    if not isinstance(value, tuple | list) or not all(type(n) is int and 0 <= n < 1 << 60 for n in value):
        raise FormatError("bad-header", f"{name}: {str(value)[:60]} is no shape")
    return tuple(value)


def _items(
    stored: Mapping[Any, Any], tensors: Mapping[str, TensorEntry], objects: Mapping[str, Any]
) -> tuple[dict[str, tuple[Item, ...]], tuple[str, ...], tuple[str, ...]]:
    chunks = {(t.name, c.offsets): (t, c) for t in tensors.values() for c in t.chunks}
    missing_objects = dict.fromkeys(objects)
    by_file: dict[str, list[Item]] = {}
    unknown: list[str] = []
    for key, place in stored.items():
        if not isinstance(key, Opaque) or not isinstance(place, Opaque):
            raise FormatError("bad-header", "storage_data holds something else than places of items")
        name = str(key.get("fqn"))
        file, offset, length = place.get("relative_path"), place.get("offset"), place.get("length")
        if (
            not isinstance(file, str)
            or type(offset) is not int
            or type(length) is not int
            or offset < 0
            or length < 0
        ):
            raise FormatError(
                "bad-header",
                f"{name}: its place, {str(file)[:60]} at {offset} with {length} bytes, is impossible",
            )
        transforms = place.get("transform_descriptors") or ()
        transforms = (
            tuple(str(t) for t in transforms) if isinstance(transforms, list | tuple) else (str(transforms),)
        )
        at = key.get("offset")
        at = tuple(at) if isinstance(at, tuple | list) else None
        item = None
        if name in objects:
            missing_objects.pop(name, None)
            item = Item(name, file, offset, length, transforms=transforms)
        elif name in tensors:
            found = chunks.pop((name, at if at is not None else (0,) * len(tensors[name].shape)), None)
            if found is not None:
                item = Item(name, file, offset, length, found[1], found[0].dtype, transforms)
        if item is None:
            unknown.append(f"{name} at {at}" if at is not None else name)
            continue
        by_file.setdefault(file, []).append(item)
    unplaced = tuple(f"{name} at {offsets}" for name, offsets in chunks) + tuple(missing_objects)
    items = {
        file: tuple(sorted(found, key=lambda i: (i.offset, i.length))) for file, found in by_file.items()
    }
    return items, unplaced, tuple(unknown)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _kind(value: Any) -> str:
    return value.name if isinstance(value, Opaque) else type(value).__name__

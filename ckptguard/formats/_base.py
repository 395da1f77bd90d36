"""What every reader of a container gets and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptguard.errors import FormatError
from ckptguard.formats.pickles import walk
from ckptguard.model import GlobalUse, Problem, Tensor
from ckptguard.ports import Store
from ckptguard.values import DTYPES, as_floats, itemsize

SMALL = 8 << 10  # a torch CPU generator's state has 5056 bytes
MOST_SMALL = 50_000
MOST_GROUPS = 24
MOST_JOINED = 4 << 20
PARALLEL = 8


class Source:
    """One file of a store, or a stretch of it. Counts the bytes that were asked for.

    `deep`: the content will be read too, so that a reader may ask for what only this needs.
    """

    def __init__(self, store: Store, key: str, size: int, base: int = 0, *, deep: bool = False) -> None:
        self.store = store
        self.key = key
        self.size = size
        self.base = base
        self.deep = deep
        self.bytes_read = 0

    def read(self, start: int, length: int) -> bytes:
        """Exactly `length` bytes, or FormatError where the file ends before; StoreError where it cannot be read."""
        if start < 0 or length < 0 or start + length > self.size:
            raise FormatError(
                "truncated", f"bytes {start} to {start + length} are wanted, the file ends at {self.size}"
            )
        self.bytes_read += length
        return self.store.read(self.key, self.base + start, length)

    def part(self, start: int, length: int) -> Source:
        """A stretch of this file as a source of its own, whose offsets start at 0."""
        return Source(self.store, self.key, length, self.base + start, deep=self.deep)


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes with the CRC-32 that its container recorded, None where none was computed."""

    start: int
    length: int
    crc: int | None
    name: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a reader understood of a file. Offsets in spans, gaps and tensors count from the file's start.

    `gaps` are the small stretches that hold the container's own structure; `verify` is given their bytes once the
    content was read and returns what is wrong with them.
    """

    kind: str
    tree: Any = None
    tensors: tuple[Tensor, ...] = ()
    globals: tuple[GlobalUse, ...] = ()
    problems: tuple[Problem, ...] = ()
    spans: tuple[Span, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()
    verify: Callable[[Mapping[int, bytes]], Iterable[Problem]] | None = None
    proven: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)


def name_tensors(tree: Any) -> tuple[Tensor, ...]:
    """All tensors of a tree, each named by its path in it ("model.wte.weight")."""
    found: dict[int, Tensor] = {}
    for path, leaf in walk(tree):
        if isinstance(leaf, Tensor) and id(leaf) not in found:
            leaf.name = ".".join(str(p) for p in path) or leaf.name
            found[id(leaf)] = leaf
    return tuple(found.values())


def decode(raw: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Raw little-endian elements as a numpy array. bfloat16 and fp8, which numpy lacks, come as float32, exactly."""
    bits = DTYPES.get(dtype)
    if bits is None:
        raise FormatError("bad-header", f"dtype {dtype} is not known")
    if dtype == "bool":
        return np.frombuffer(raw, np.uint8).astype(bool).reshape(shape)
    if bits.kind == "x":
        return np.frombuffer(raw, np.uint8).reshape(shape)
    if bits.kind == "f":
        unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[bits.width]
        return as_floats(np.frombuffer(raw, unsigned), dtype).reshape(shape)
    text = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}.get(dtype, dtype)
    return np.frombuffer(raw, np.dtype(text)).reshape(shape)


def load_array(source: Source, tensor: Tensor) -> np.ndarray:
    """Read one tensor's numbers. Memory: one copy of the tensor. Raises FormatError, StoreError."""
    if tensor.value is not None:
        return np.asarray(tensor.value).reshape(tensor.shape)
    if 0 in tensor.shape:
        return decode(b"", tensor.dtype, tensor.shape)
    if tensor.start is None:
        raise FormatError("missing-tensor", f"{tensor.name} has no bytes in this file")
    raw = source.read(tensor.start, tensor.nbytes)
    if tensor.contiguous or tensor.strides is None:
        return decode(raw, tensor.dtype, tensor.shape)
    flat = decode(raw, tensor.dtype, (len(raw) // itemsize(tensor.dtype),))
    steps = tuple(s * flat.itemsize for s in tensor.strides)
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, steps, writeable=False)


def read_small_values(
    source: Source, tensors: Sequence[Tensor], *, overhead: int = 0, sure: bool = False
) -> None:
    """Fill in `value` of small tensors, with neighbouring reads joined as far as the store finds that cheaper.

    `overhead` is what lies between the values of neighbours in this container. In a store where a request costs more
    than bytes, only as many groups are read as a structure audit may cost; what is left stays unread. Values that the
    pass over the content will bring by itself are left to it, unless they must be there before (`sure`).
    """
    small = [
        t
        for t in tensors
        if t.value is None and t.start is not None and 0 < t.nbytes <= SMALL and t.contiguous
    ]
    if source.deep and not source.base and not sure:
        small = _in_others(small, tensors)
    wanted = sorted(small, key=lambda t: t.start or 0)[:MOST_SMALL]
    distant = source.store.traits.request_bytes
    groups = list(_neighbours(wanted, max(distant, overhead)))
    if distant and len(groups) > MOST_GROUPS:
        groups = sorted(groups, key=len, reverse=True)[:MOST_GROUPS]

    def read(group: list[Tensor]) -> bytes:
        first = group[0].start or 0
        end = max((t.start or 0) + t.nbytes for t in group)
        return source.read(first, min(end, source.size) - first)

    for group, raw in zip(groups, _all_at_once(read, groups) if distant else map(read, groups)):
        for tensor in group:
            at = (tensor.start or 0) - (group[0].start or 0)
            if itemsize(tensor.dtype) and at + tensor.nbytes <= len(raw):
                tensor.value = decode(raw[at : at + tensor.nbytes], tensor.dtype, tensor.shape)


def _all_at_once(read: Callable[[list[Tensor]], bytes], groups: list[list[Tensor]]) -> Iterable[bytes]:
    """The reads in parallel: over a network each is mostly waiting."""
    if len(groups) < 2:
        return map(read, groups)
    with ThreadPoolExecutor(min(PARALLEL, len(groups)), thread_name_prefix="ckptguard-small") as pool:
        return list(pool.map(read, groups))


def _neighbours(tensors: Iterable[Tensor], join: int) -> Iterator[list[Tensor]]:
    """Tensors, sorted by start, in groups that are each read at once."""
    group: list[Tensor] = []
    for tensor in tensors:
        start = tensor.start or 0
        if group and (
            start - (group[-1].start or 0) - group[-1].nbytes > join
            or start - (group[0].start or 0) >= MOST_JOINED
        ):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _in_others(small: list[Tensor], tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that share some of their bytes with another tensor's, so that the pass sees no stretch that is theirs alone."""
    spans = sorted({(t.start, t.start + t.nbytes) for t in tensors if t.start is not None and t.nbytes})
    sharing: set[tuple[int, int]] = set()
    widest = (0, 0)
    for span in spans:
        if span[0] < widest[1]:
            sharing |= {span, widest}
        widest = max(widest, span, key=lambda s: s[1])
    return [t for t in small if (t.start, (t.start or 0) + t.nbytes) in sharing]

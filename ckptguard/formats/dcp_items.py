"""DCP's shards, `__R_I.distcp`: items one behind the other, each a torch zip archive of its own with CRC-32 checksums.

`.metadata` says where each item lies and what it holds. At structure the small items are read, neighbours joined into
one read: all pickled objects, and the tensors that are counters or generator states. At content the archive of every
item is opened, so that each byte of the shard is known to be payload, checked by its CRC-32, or structure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ckptguard.errors import FormatError
from ckptguard.formats import torch_zip
from ckptguard.formats._base import Parsed, Source, Span
from ckptguard.formats._nested import Held, nested
from ckptguard.formats.dcp_metadata import Index, Item
from ckptguard.model import GlobalUse, Problem, Tensor
from ckptguard.values import itemsize

SHARD = re.compile(r"__(\d+)_(\d+)\.distcp$")
SMALL_ITEM = 64 << 10  # read whole; larger ones by their ends
HEAD, TAIL = 1024, 2048  # what of a large item holds its pickle and its directory
NUMBERS = 64  # bytes of a tensor that may be a counter
GENERATOR = 8 << 10
LONGEST_READ = 4 << 20
NEAR = 4096  # on a disk, skipping less than this costs more than reading it


def index_for(name: str, known: Mapping[str, Parsed]) -> tuple[Index | None, str]:
    """The index that describes a shard, and the shard's name in it: the `.metadata` beside it, else its own rank's."""
    folder, _, base = name.rpartition("/")
    prefix = f"{folder}/" if folder else ""
    parsed = known.get(f"{prefix}.metadata")
    if parsed is None:
        shard = SHARD.search(base)
        parsed = known.get(f"{prefix}__{shard.group(1)}.metadata") if shard else None
    return (parsed.tree if parsed is not None and isinstance(parsed.tree, Index) else None), base


def read(source: Source, name: str, known: Mapping[str, Parsed]) -> Parsed:
    """Read the items of one shard. Raises FormatError, StoreError.

    The tree maps the names of pickled objects to what they hold. `details["chunks"]` maps (tensor, offsets) to Tensors,
    `details["items"]` is how many items the index places here, `details["transformed"]` counts bytes of items that were
    compressed or encrypted and cannot be looked into.
    """
    index, base = index_for(name, known)
    if index is None:
        return Parsed("dcp-shard", details={"indexed": False})
    items = index.items.get(base, ())
    if source.size == 0:
        if any(i.length for i in items):
            raise FormatError(
                "empty-file",
                f"0 bytes, and .metadata places {len(items)} items of {sum(i.length for i in items)} bytes here",
            )
        return Parsed("dcp-shard", {}, details={"indexed": True, "items": 0, "chunks": {}})
    if items and _is_safetensors(source):
        return _read_safetensors(source, items)
    return _Shard(source, items).read()


@dataclass(slots=True)
class _Shard:
    """Collects what the items of one shard hold."""

    source: Source
    items: Sequence[Item]
    objects: dict[str, Any] = field(default_factory=dict)
    chunks: dict[tuple[str, Any], Tensor] = field(default_factory=dict)
    uses: dict[GlobalUse, None] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    verifiers: list[tuple[Item, Callable[[Mapping[int, bytes]], Iterable[Problem]]]] = field(
        default_factory=list
    )
    transformed: int = 0

    def read(self) -> Parsed:
        self.problems += _layout_problems(self.source.size, self.items)
        inside = [i for i in self.items if i.end <= self.source.size and i.length]
        readable = [i for i in inside if not i.transforms]
        self.transformed = sum(i.length for i in inside if i.transforms)
        deep = self.source.deep
        whole = [i for i in readable if _is_small_state(i) or (deep and i.length <= SMALL_ITEM)]
        self._read_whole([i for i in whole if i.length <= SMALL_ITEM])
        self._read_ends([i for i in readable if i.length > SMALL_ITEM and (deep or i.chunk is None)])
        for item in self.items:
            if item.chunk is not None and (item.name, item.chunk.offsets) not in self.chunks:
                self._keep(item, _described(item))
        self.spans.sort(key=lambda s: s.start)
        return Parsed(
            "dcp-shard",
            self.objects,
            tuple(self.chunks.values()),
            tuple(self.uses),
            tuple(self.problems),
            tuple(self.spans),
            tuple(sorted(self.gaps)),
            self._verify if deep else None,
            details={
                "indexed": True,
                "items": len(self.items),
                "chunks": self.chunks,
                "transformed": self.transformed,
            },
        )

    def _read_whole(self, items: Sequence[Item]) -> None:
        for start, raw, members in _joined(self.source, [(i.offset, i.length, i) for i in items]):
            for item in members:
                self._open(item, Held(raw[item.offset - start : item.end - start]))

    def _read_ends(self, items: Sequence[Item]) -> None:
        windows = [w for i in items for w in ((i.offset, HEAD, i), (i.end - TAIL, TAIL, i))]
        ends: dict[int, dict[int, bytes]] = {}
        for start, raw, members in _joined(self.source, windows):
            for item in members:
                for at, length in ((item.offset, HEAD), (item.end - TAIL, TAIL)):
                    if start <= at and at + length <= start + len(raw):
                        ends.setdefault(id(item), {})[at - item.offset] = raw[
                            at - start : at - start + length
                        ]
        for item in items:
            self._open(item, _Ends(self.source, item, ends.get(id(item), {})))

    def _open(self, item: Item, source: Source) -> None:
        try:
            parsed = torch_zip.read(source)
        except FormatError as e:
            self.problems.append(
                Problem(e.code, item.label, f"the item {item.label} at byte {item.offset}: {e}")
            )
            return
        for use in parsed.globals:
            self.uses[use] = None
        for _, names in nested(parsed.tree):
            self.uses.update(dict.fromkeys(names))
        for problem in parsed.problems:
            self.problems.append(
                replace(problem, where=item.label, message=f"the item {item.label}: {problem.message}")
            )
        self._place(item, parsed)
        if item.chunk is None:
            self.objects[item.name] = parsed.tree
            for tensor in parsed.tensors:
                _move(tensor, item)
            return
        if not isinstance(parsed.tree, Tensor):
            self.problems.append(
                Problem(
                    "bad-header",
                    item.label,
                    f"the item {item.label} at byte {item.offset} holds {type(parsed.tree).__name__} where a tensor belongs",
                )
            )
            return
        self._check_tensor(item, parsed.tree)
        _move(parsed.tree, item)
        self._keep(item, parsed.tree)

    def _place(self, item: Item, parsed: Parsed) -> None:
        """Spans and gaps of an item, as offsets in the shard."""
        payload = f"{parsed.details.get('root', '')}/data/"
        for span in parsed.spans:
            name = item.label if span.name.startswith(payload) else f"{item.label} ({span.name})"
            self.spans.append(Span(span.start + item.offset, span.length, span.crc, name))
        self.gaps += [(start + item.offset, length) for start, length in parsed.gaps]
        if parsed.verify is not None:
            self.verifiers.append((item, parsed.verify))

    def _check_tensor(self, item: Item, tensor: Tensor) -> None:
        assert item.chunk is not None
        if tensor.shape != item.chunk.sizes:
            self.problems.append(
                Problem(
                    "shape-mismatch",
                    item.label,
                    f"{item.label} has the shape {list(tensor.shape)} in the shard, .metadata says {list(item.chunk.sizes)}",
                )
            )
        if tensor.dtype != item.dtype:
            self.problems.append(
                Problem(
                    "dtype-mismatch",
                    item.label,
                    f"{item.label} is {tensor.dtype} in the shard, .metadata says {item.dtype}",
                )
            )

    def _keep(self, item: Item, tensor: Tensor) -> None:
        assert item.chunk is not None
        tensor.name = item.label
        self.chunks[item.name, item.chunk.offsets] = tensor

    def _verify(self, found: Mapping[int, bytes]) -> Iterator[Problem]:
        for item, verify in self.verifiers:
            for problem in verify(_Shifted(found, item.offset)):  # type: ignore[arg-type]
                yield replace(problem, where=item.label, message=f"the item {item.label}: {problem.message}")


class _Shifted:
    """Bytes by offset, seen from the start of an item."""

    def __init__(self, found: Mapping[int, bytes], base: int) -> None:
        self.found = found
        self.base = base

    def get(self, at: int, default: bytes | None = None) -> bytes | None:
        return self.found.get(at + self.base, default)


class _Ends(Source):
    """A large item of which both ends were read already."""

    def __init__(self, source: Source, item: Item, ends: Mapping[int, bytes]) -> None:
        super().__init__(source.store, source.key, item.length, source.base + item.offset)
        self.ends = ends

    def read(self, start: int, length: int) -> bytes:
        for at, raw in self.ends.items():
            if at <= start and start + length <= at + len(raw):
                return raw[start - at : start - at + length]
        return super().read(start, length)


def _described(item: Item) -> Tensor:
    """A chunk as the index describes it, its place in the item unknown."""
    assert item.chunk is not None
    nbytes = item.chunk.numel * itemsize(item.dtype)
    return Tensor(
        item.label,
        item.dtype,
        item.chunk.sizes,
        None,
        nbytes,
        location="transformed" if item.transforms else "cpu",
    )


def _move(tensor: Tensor, item: Item) -> None:
    if tensor.start is not None:
        tensor.start += item.offset
    tensor.storage = item.label


def _is_small_state(item: Item) -> bool:
    """Objects, counters and generator states: the small state that structure cross-checks."""
    if item.chunk is None:
        return True
    nbytes = item.chunk.numel * itemsize(item.dtype)
    return 0 < nbytes <= NUMBERS or (item.dtype == "uint8" and nbytes <= GENERATOR)


def _joined(
    source: Source, wanted: Iterable[tuple[int, int, Item]]
) -> Iterator[tuple[int, bytes, list[Item]]]:
    """Neighbouring stretches read as one: (where it starts, the bytes, whose they are)."""
    join = max(NEAR, source.store.traits.request_bytes)
    group: list[Item] = []
    begin = end = 0
    for start, length, item in sorted(wanted, key=lambda w: w[0]):
        if group and (start - end > join or max(end, start + length) - begin > LONGEST_READ):
            yield begin, source.read(begin, end - begin), group
            group = []
        if not group:
            begin, end = start, start
        group.append(item)
        end = max(end, start + length)
    if group:
        yield begin, source.read(begin, end - begin), group


def _layout_problems(size: int, items: Sequence[Item]) -> Iterator[Problem]:
    """Whether the items lie in the file, one behind the other."""
    beyond = [i for i in items if i.end > size]
    if beyond:
        # A file that lost its end lacks what follows without a hole; an index that points elsewhere jumps.
        jumps = any(b.offset > a.end for a, b in pairwise(items)) or beyond[0].offset > size
        first = beyond[0]
        code = "out-of-bounds" if jumps or len({i.offset for i in items}) < len(items) else "truncated"
        yield Problem(
            code,
            first.label,
            f".metadata places {first.label} at bytes {first.offset} to {first.end}, the file ends at {size}; {len(beyond)} of {len(items)} items are cut off",
        )
    at = 0
    before: Item | None = None
    covered = 0
    for item in items:
        if item.offset > at and item.offset < size:
            yield Problem(
                "unindexed-tensor", "", f"{item.offset - at} bytes at {at} belong to no item of .metadata"
            )
        elif item.offset < at and before is not None and item.length:
            yield Problem(
                "out-of-bounds",
                item.label,
                f".metadata places {item.label} at byte {item.offset}, inside {before.label}, which ends at {at}",
            )
        covered += item.length
        if item.end >= at:
            at, before = item.end, item
    if at < size:
        what = "the whole file is" if not items else f"{size - at} bytes behind the last item are"
        yield Problem("unindexed-tensor", "", f"{what} in no item of .metadata: left over from another save")


# --- shards in the safetensors format -----------------------------------------------------------------


def _is_safetensors(source: Source) -> bool:
    head = source.read(0, min(9, source.size))
    return len(head) == 9 and head[8:9] == b"{" and head[:2] != b"PK"


def _read_safetensors(source: Source, items: Sequence[Item]) -> Parsed:
    """A shard that DCP wrote as one safetensors file: its own header tells the places, `.metadata` the chunks."""
    from ckptguard.formats import safetensors

    parsed = safetensors.read(source)
    held = {t.name: t for t in parsed.tensors}
    chunks: dict[tuple[str, Any], Tensor] = {}
    problems = list(parsed.problems)
    for item in items:
        tensor = held.get(item.name)
        if item.chunk is None:
            continue
        if tensor is None:
            problems.append(
                Problem(
                    "missing-tensor",
                    item.label,
                    f".metadata places {item.label} here, the file's header does not have it",
                )
            )
            continue
        if tensor.shape != item.chunk.sizes:
            problems.append(
                Problem(
                    "shape-mismatch",
                    item.label,
                    f"{item.label} has the shape {list(tensor.shape)} in the shard, .metadata says {list(item.chunk.sizes)}",
                )
            )
        if tensor.dtype != item.dtype:
            problems.append(
                Problem(
                    "dtype-mismatch",
                    item.label,
                    f"{item.label} is {tensor.dtype} in the shard, .metadata says {item.dtype}",
                )
            )
        chunks[item.name, item.chunk.offsets] = tensor
    return replace(
        parsed,
        kind="dcp-shard",
        tree={},
        problems=tuple(problems),
        details={**parsed.details, "indexed": True, "items": len(items), "chunks": chunks},
    )

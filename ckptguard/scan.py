"""The pass over one file's bytes: each is read once, and hash, CRC and value statistics come from the same buffer.

A file is cut into segments that threads take independently. Tensors are hashed in pieces counted from their own first
byte; where a segment begins or ends inside a piece, its bytes come back as a seam and are joined with the neighbour's.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import xxhash

from ckptguard.digest import PIECE, crc32, crc32_join, facts_from, join_pieces, piece_digest
from ckptguard.formats._base import Span
from ckptguard.model import TensorFacts
from ckptguard.ports import Fill
from ckptguard.values import Values, values_of, zero_pages

SEGMENT = 32 << 20
# Read at once, two pieces at least: few calls a byte, and still warm in the cache when it is hashed and looked at.
READ = 4 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of a tensor: where, how many, of which dtype.

    `keep`: its bytes are wanted, not only their statistics. `bare`: no checksum covers it, so pages of zeros count.
    """

    start: int
    nbytes: int
    dtype: str
    keep: bool = False
    bare: bool = False

    def values(self, piece: memoryview | bytes) -> Values:
        """Statistics of whole pieces that lie side by side."""
        found = values_of(piece, self.dtype)
        return replace(found, zero_pages=zero_pages(piece)) if self.bare else found

    @property
    def end(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What is wanted of a file. Extents, spans and gaps are each sorted by start; extents do not overlap.

    `block_size` asks for the digests of the file's blocks; it must divide SEGMENT. 0: not wanted. `joined`: how many
    SEGMENTs make one stretch, where beginning to read costs more than having few stretches.
    """

    size: int
    extents: tuple[Extent, ...] = ()
    spans: tuple[Span, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()
    block_size: int = 0
    joined: int = 1

    def segments(self) -> Iterator[tuple[int, int]]:
        """Stretches that can be read independently."""
        at = 0
        while at < self.size:
            end = min(self.size, at + self.joined * SEGMENT)
            if not self.block_size and end < self.size:
                end = self._cut(at, end, self.size)
            yield at, end
            at = end

    def _cut(self, begin: int, stop: int, limit: int) -> int:
        """The end of a read or segment at or before `stop` that splits no piece, if there is one."""
        i = bisect_left(self.extents, stop, key=lambda e: e.start) - 1
        if i < 0 or self.extents[i].end <= stop:
            return stop
        extent = self.extents[i]
        piece = extent.start + (stop - extent.start) // PIECE * PIECE
        if piece > begin:
            return piece
        return min(piece + PIECE, extent.end, limit)


@dataclass(slots=True)
class Part:
    """What one segment gave."""

    begin: int
    end: int
    crcs: list[tuple[int, int, int]] = field(default_factory=list)  # span, CRC, length
    runs: list[tuple[int, int, list[bytes], Values]] = field(
        default_factory=list
    )  # extent, first piece, digests of it and of those after it, values of all
    seams: list[tuple[int, int, bytes]] = field(default_factory=list)  # extent, piece, bytes
    gaps: list[tuple[int, int, bytes]] = field(default_factory=list)  # gap, offset, bytes
    kept: dict[int, bytes] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scanned:
    """What the whole file gave, in the order of the plan's spans and extents."""

    crcs: tuple[int, ...]
    tensors: tuple[TensorFacts, ...]
    gaps: dict[int, bytes]
    kept: dict[int, bytes]
    blocks: tuple[str, ...]


_local = threading.local()


def _buffer(size: int) -> memoryview:
    """This thread's buffer: fresh memory for every segment would cost more than the checksums."""
    buffer: memoryview | None = getattr(_local, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _local.buffer = memoryview(bytearray(size))
    return buffer


def scan_segment(fill: Fill, plan: Plan, begin: int, end: int) -> Part:
    """Read one segment. `fill` gives its bytes in order and raises StoreError."""
    part = Part(begin, end)
    crcs: dict[int, tuple[int, int]] = {}
    hasher = xxhash.xxh3_128() if plan.block_size else None
    whole = _buffer(min(READ, end - begin))
    at = begin
    while at < end:
        stop = min(end, at + READ)
        if stop < end:
            stop = plan._cut(at, stop, end)
        view = whole[: stop - at]
        fill(view)
        if hasher is not None:
            hasher = _blocks(part, hasher, plan, view, at, stop, end)
        _spans(crcs, plan, view, at, stop)
        _extents(part, plan, view, at, stop)
        _gaps(part, plan, view, at, stop)
        at = stop
    part.crcs = [(index, crc, length) for index, (crc, length) in crcs.items()]
    return part


def _blocks(
    part: Part, hasher: xxhash.xxh3_128, plan: Plan, view: memoryview, at: int, stop: int, end: int
) -> xxhash.xxh3_128:
    done = at
    while done < stop:
        edge = min(stop, (done // plan.block_size + 1) * plan.block_size)
        hasher.update(view[done - at : edge - at])
        done = edge
        if done % plan.block_size == 0 or done == plan.size or done == end:
            part.blocks.append(hasher.hexdigest())
            hasher = xxhash.xxh3_128()
    return hasher


def _overlapping(
    items: Sequence[Extent] | Sequence[Span], starts: Callable, length: Callable, at: int, stop: int
) -> Iterator[int]:
    """Indexes of the items that share bytes with [at, stop): the items are sorted and do not overlap."""
    i = max(0, bisect_right(items, at, key=starts) - 1)
    while i < len(items) and starts(items[i]) < stop:
        if starts(items[i]) + length(items[i]) > at:
            yield i
        i += 1


def _spans(crcs: dict[int, tuple[int, int]], plan: Plan, view: memoryview, at: int, stop: int) -> None:
    for i in _overlapping(plan.spans, lambda s: s.start, lambda s: s.length, at, stop):
        span = plan.spans[i]
        if span.crc is None:
            continue
        low, high = max(at, span.start), min(stop, span.start + span.length)
        crc, length = crcs.get(i, (0, 0))
        crcs[i] = (crc32(view[low - at : high - at], crc), length + high - low)


def _extents(part: Part, plan: Plan, view: memoryview, at: int, stop: int) -> None:
    for i in _overlapping(plan.extents, lambda e: e.start, lambda e: e.nbytes, at, stop):
        extent = plan.extents[i]
        low, high = max(at, extent.start), min(stop, extent.end)
        first = -(-(low - extent.start) // PIECE)  # of the whole pieces here
        last = -(-extent.nbytes // PIECE) if high == extent.end else (high - extent.start) // PIECE
        begin = min(high, extent.start + first * PIECE)
        end = max(begin, min(high, extent.start + last * PIECE))
        if low < begin:
            part.seams.append((i, first - 1, bytes(view[low - at : begin - at])))
        if begin < end:
            run = view[begin - at : end - at]
            digests = [piece_digest(run[k : k + PIECE]) for k in range(0, len(run), PIECE)]
            part.runs.append((i, first, digests, extent.values(run)))
            if extent.keep:
                part.kept[i] = bytes(run)
        if end < high:
            part.seams.append((i, last, bytes(view[end - at : high - at])))


def _gaps(part: Part, plan: Plan, view: memoryview, at: int, stop: int) -> None:
    i = max(0, bisect_right(plan.gaps, at, key=lambda g: g[0]) - 1)
    while i < len(plan.gaps) and plan.gaps[i][0] < stop:
        start, length = plan.gaps[i]
        low, high = max(at, start), min(stop, start + length)
        if low < high:
            part.gaps.append((i, low - start, bytes(view[low - at : high - at])))
        i += 1


class Joiner:
    """Joins the parts of all segments, given in the file's order. A seam is hashed and forgotten once it is whole."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._crcs: dict[int, int] = {}
        self._digests: dict[int, dict[int, bytes]] = defaultdict(dict)
        self._values: dict[int, Values] = defaultdict(Values)
        self._seams: dict[tuple[int, int], bytes] = defaultdict(bytes)
        self._gaps: dict[int, list[bytes]] = defaultdict(list)
        self._kept: dict[int, bytes] = {}
        self._blocks: list[str] = []

    def add(self, part: Part) -> None:
        """Take the next part."""
        for i, crc, length in part.crcs:
            self._crcs[i] = crc32_join(self._crcs[i], crc, length) if i in self._crcs else crc
        for i, first, digests, found in part.runs:
            self._digests[i].update(enumerate(digests, first))
            self._values[i] += found
        for i, number, raw in part.seams:
            self._seam(i, number, raw)
        for i, _, raw in part.gaps:
            self._gaps[i].append(raw)
        self._kept |= part.kept
        self._blocks += part.blocks

    def _seam(self, i: int, number: int, raw: bytes) -> None:
        extent = self._plan.extents[i]
        whole = self._seams.pop((i, number), b"") + raw
        if len(whole) < min(PIECE, extent.nbytes - number * PIECE):
            self._seams[i, number] = whole
            return
        self._digests[i][number] = piece_digest(whole)
        self._values[i] += extent.values(whole)
        if extent.keep:
            self._kept[i] = whole

    def done(self) -> Scanned:
        """What the whole file gave. Call it when every part was added."""
        assert not self._seams
        tensors = tuple(
            facts_from(
                join_pieces(self._digests[i][n] for n in sorted(self._digests[i])),
                e.nbytes,
                e.dtype,
                self._values[i],
            )
            for i, e in enumerate(self._plan.extents)
        )
        gaps = {self._plan.gaps[i][0]: b"".join(pieces) for i, pieces in self._gaps.items()}
        crcs = tuple(self._crcs.get(i, 0) for i in range(len(self._plan.spans)))
        return Scanned(crcs, tensors, gaps, self._kept, tuple(self._blocks))


def join(plan: Plan, parts: Iterable[Part]) -> Scanned:
    """Join the parts of all segments, given in order."""
    joiner = Joiner(plan)
    for part in parts:
        joiner.add(part)
    return joiner.done()


def scan(fill: Fill, plan: Plan) -> Scanned:
    """The whole pass in one thread; `fill` gives the file's bytes in order."""
    return join(plan, [scan_segment(fill, plan, begin, end) for begin, end in plan.segments()])

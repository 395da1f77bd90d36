from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptguard.codes import finding
from ckptguard.formats.dcp_metadata import Box, Chunk, Index, TensorEntry, merge
from ckptguard.model import Evidence, FileFacts, Finding
from ckptguard.ports import Subject

MOST = 20


class ChunkTiling:
    """Whether the chunks of each tensor of a distributed checkpoint cover it, once.

    Finds: elements that lie in no chunk, chunks that overlap, chunks that reach outside of their tensor.
    Why it matters: DCP fills what it finds and leaves the rest as it was in memory: freshly initialised weights, silently.
    Example: a `.metadata` that was put together of what only half of the ranks had written.
    What to do: resume from the checkpoint before; the missing elements are in no file.
    Blind spots: safetensors shards record no global shape, so that a tensor's missing last rows look like a smaller tensor
    (config and optimizer are compared with it elsewhere).
    """

    name = "chunk-tiling"
    needs = Evidence.STRUCTURE
    codes = ("missing-tensor", "shape-mismatch")

    def run(self, subject: Subject) -> Iterator[Finding]:
        for name, index in indexes(subject.facts.files):
            faults = [f for entry in index.tensors.values() for f in _faults(name, entry)]
            yield from faults[:MOST]
            if len(faults) > MOST:
                yield finding(
                    "missing-tensor",
                    name,
                    f"{name}: {len(faults) - MOST} more tensors are not tiled by their chunks",
                )


def indexes(files: Mapping[str, FileFacts]) -> Iterator[tuple[str, Index]]:
    """The index of every DCP directory of a checkpoint, that of all ranks joined where each wrote its own."""
    ranks: dict[str, list[Index]] = {}
    for name, facts in files.items():
        if isinstance(facts.tree, Index):
            folder, _, base = name.rpartition("/")
            if base == ".metadata":
                yield name, facts.tree
            else:
                ranks.setdefault(f"{folder}/" if folder else "", []).append(facts.tree)
    for prefix, parts in ranks.items():
        yield f"{prefix}__0.metadata", merge(parts)


def _faults(name: str, entry: TensorEntry) -> Iterator[Finding]:
    subject = f"{name}:{entry.name}"
    chunks = [c for c in entry.chunks if c.numel]
    for chunk in chunks:
        if (
            len(chunk.offsets) != len(entry.shape)
            or len(chunk.sizes) != len(entry.shape)
            or any(o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, entry.shape))
        ):
            yield finding(
                "shape-mismatch",
                subject,
                f"{entry.name} of shape {list(entry.shape)} has a chunk of {list(chunk.sizes)} at {list(chunk.offsets)}",
            )
            return
    total = 1
    for extent in entry.shape:
        total *= extent
    if not total:
        return
    overlaps = overlapping(chunks)
    if overlaps is not None:
        one, two = overlaps
        yield finding(
            "shape-mismatch",
            subject,
            f"two chunks of {entry.name} overlap: {list(one.sizes)} at {list(one.offsets)} and {list(two.sizes)} at {list(two.offsets)}",
        )
        return
    held = sum(c.numel for c in chunks)
    if held != total:
        yield finding(
            "missing-tensor",
            subject,
            f"{total - held} of the {total} elements of {entry.name} {list(entry.shape)} are in no chunk",
        )


def overlapping(chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks that share an element, if there are any. Sweeps along the first dimension that cuts the tensor."""
    if len(chunks) < 2:
        return None
    if not chunks[0].offsets:
        return chunks[0], chunks[1]
    axis = max(range(len(chunks[0].offsets)), key=lambda a: len({c.offsets[a] for c in chunks}))
    active: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: c.offsets[axis]):
        start = chunk.offsets[axis]
        active = [c for c in active if c.offsets[axis] + c.sizes[axis] > start]
        for other in active:
            if _share(chunk.offsets, chunk.sizes, other.offsets, other.sizes):
                return other, chunk
        active.append(chunk)
    return None


def _share(a: Box, a_sizes: Box, b: Box, b_sizes: Box) -> bool:
    return all(x < y + n and y < x + m for x, m, y, n in zip(a, a_sizes, b, b_sizes))


CHECK = ChunkTiling()

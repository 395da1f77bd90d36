"""One pass over the bytes: what it finds does not depend on how it was cut, and its memory not on the file's size."""

from __future__ import annotations

import io
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard import digest, scan
from ckptguard.digest import crc32, crc32_join, tensor_facts
from ckptguard.formats._base import Span
from ckptguard.values import DTYPES, itemsize, values_of

PIECE, SEGMENT, READ = 64, 256, 192


@st.composite
def plans(draw: st.DrawFn) -> scan.Plan:
    """A file of a few pieces with tensors, checksummed records and gaps at any place."""
    size = draw(st.integers(1, 2000))
    extents, at = [], 0
    while at < size and draw(st.booleans()):
        dtype = draw(
            st.sampled_from(
                [
                    "float32",
                    "bfloat16",
                    "float16",
                    "float8_e4m3fn",
                    "int64",
                    "uint8",
                    "bool",
                    "complex64",
                    "opaque",
                ]
            )
        )
        at += draw(st.integers(0, 100))
        nbytes = draw(st.integers(1, 60)) ** 2 // (itemsize(dtype) or 1) * (itemsize(dtype) or 1)
        if not nbytes or at + nbytes > size:
            break
        extents.append(scan.Extent(at, nbytes, dtype, keep=nbytes <= PIECE))
        at += nbytes
    spans, at = [], 0
    while at < size and draw(st.booleans()):
        at += draw(st.integers(0, 50))
        length = min(draw(st.integers(1, 900)), size - at)
        if length <= 0:
            break
        spans.append(Span(at, length, draw(st.sampled_from([None, 1])), f"record {at}"))
        at += length
    gaps, at = [], 0
    while at < size and draw(st.booleans()):
        at += draw(st.integers(0, 300))
        length = min(draw(st.integers(1, 90)), size - at)
        if length <= 0:
            break
        gaps.append((at, length))
        at += length
    return scan.Plan(
        size, tuple(extents), tuple(spans), tuple(gaps), draw(st.sampled_from([0, 32, 128, 256]))
    )


def expected(plan: scan.Plan, data: bytes) -> scan.Scanned:
    """The same by the plainest means."""
    return scan.Scanned(
        tuple(zlib.crc32(data[s.start : s.start + s.length]) if s.crc is not None else 0 for s in plan.spans),
        tuple(tensor_facts(data[e.start : e.end], e.dtype) for e in plan.extents),
        {start: data[start : start + length] for start, length in plan.gaps},
        {i: data[e.start : e.end] for i, e in enumerate(plan.extents) if e.keep},
        tuple(
            xxhash.xxh3_128_hexdigest(data[at : at + plan.block_size])
            for at in range(0, plan.size, plan.block_size or plan.size)
        )
        if plan.block_size
        else (),
    )


def alike(one: scan.Scanned, two: scan.Scanned) -> None:
    assert (one.crcs, one.gaps, one.kept, one.blocks) == (two.crcs, two.gaps, two.kept, two.blocks)
    for a, b in zip(one.tensors, two.tensors, strict=True):
        assert (a.digest, a.nbytes, a.nan, a.inf, a.minimum, a.maximum, a.zeros) == (
            b.digest,
            b.nbytes,
            b.nan,
            b.inf,
            b.minimum,
            b.maximum,
            b.zeros,
        )
        # Sums of squares are taken piece by piece; only their last bits may depend on the cut.
        assert (
            a.norm == pytest.approx(b.norm, rel=1e-5, nan_ok=True) if b.norm is not None else a.norm is None
        )


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Any:
    """Pieces and segments so small that every plan has many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "PIECE", PIECE)
        patch.setattr(digest, "PIECE", PIECE)
        patch.setattr(scan, "SEGMENT", SEGMENT)
        patch.setattr(scan, "READ", READ)
        yield


def from_start(raw: bytes) -> Callable[[memoryview], object]:
    return io.BytesIO(raw).readinto


@given(plans(), st.randoms(use_true_random=False), st.data())
def test_any_cut_gives_the_same(plan: scan.Plan, random: Any, data: st.DataObject) -> None:
    raw = random.randbytes(plan.size)
    want = expected(plan, raw)
    alike(scan.scan(from_start(raw), plan), want)
    cuts = sorted({0, plan.size, *data.draw(st.lists(st.integers(0, plan.size), max_size=5))})
    if plan.block_size:  # blocks begin at multiples of their size only
        cuts = sorted({0, plan.size, *(c // plan.block_size * plan.block_size for c in cuts[:-1])})
    parts = [scan.scan_segment(from_start(raw[a:b]), plan, a, b) for a, b in pairwise(cuts)]
    alike(scan.join(plan, parts), want)


@given(plans(), st.integers(1, 3))
def test_segments_cover_the_file_once(plan: scan.Plan, joined: int) -> None:
    segments = list(replace(plan, joined=joined).segments())
    assert segments[0][0] == 0 and segments[-1][1] == plan.size
    assert all(a[1] == b[0] for a, b in pairwise(segments))
    assert all(0 < end - begin <= joined * SEGMENT + PIECE for begin, end in segments)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_joined_checksums_are_those_of_the_whole(one: bytes, two: bytes) -> None:
    assert crc32_join(crc32(one), crc32(two), len(two)) == zlib.crc32(one + two)


FLOATS = [d for d, bits in DTYPES.items() if bits.kind == "f"]


@pytest.mark.parametrize("dtype", FLOATS)
@given(
    random=st.randoms(use_true_random=False),
    kind=st.sampled_from(["any", "finite", "positive", "negative", "zeros"]),
)
@settings(max_examples=15)
def test_statistics_are_those_of_torch(dtype: str, random: Any, kind: str) -> None:
    numbers = torch.tensor([random.gauss(0, 3) for _ in range(37)])
    if kind != "any":
        numbers = {
            "positive": numbers.abs(),
            "negative": -numbers.abs(),
            "zeros": numbers * 0,
            "finite": numbers,
        }[kind]
        tensor = numbers.to(getattr(torch, dtype))
    else:
        width = itemsize(dtype)
        tensor = torch.frombuffer(bytearray(random.randbytes(37 * width)), dtype=getattr(torch, dtype))
    found = values_of(tensor.view(torch.uint8).numpy().tobytes(), dtype)
    wide = tensor.double()
    finite = wide[wide.isfinite()]
    assert (found.nan, found.inf) == (int(wide.isnan().sum()), int(wide.isinf().sum()))
    if finite.numel():
        assert (found.minimum, found.maximum) == (finite.min().item(), finite.max().item())
        assert found.squares == pytest.approx((finite**2).sum().item(), rel=1e-5)


def test_a_sum_of_squares_beyond_the_type_is_still_a_number() -> None:
    large = np.full(1000, 3e38, np.float32)
    assert np.isfinite(values_of(large.tobytes(), "float32").squares)


# --- memory -------------------------------------------------------------------------------------------

PEAK = """
import sys
from ckptguard.inspect import Options, audit
report = audit(sys.argv[1], Options(jobs=2, grace=0))
# Not ru_maxrss: a child begins with its parent's.
most = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(report[0].checkpoints[0].coverage.bytes_read, int(most) << 10)
"""


def sparse_checkpoint(folder: Path, gigabytes: float) -> Path:
    """A torch file whose tensors are holes: as large as one likes, and no bytes on the disk."""
    path = folder / "ckpt_100.pt"
    count = int(gigabytes * (1 << 28))
    with torch.serialization.skip_data():
        torch.save({"model": {"w": torch.empty(count)}, "step": 100}, path)
    return path


def peak(path: Path) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    read, most = done.stdout.split()
    return int(read), int(most)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    read, most = peak(sparse_checkpoint(tmp_path, 2))
    assert read >= 2 << 30
    assert most < 300 << 20


@pytest.mark.soak
def test_twenty_gigabytes_need_less_than_one(tmp_path: Path) -> None:
    read, most = peak(sparse_checkpoint(tmp_path, 20))
    assert read >= 20 << 30
    assert most < 500 << 20

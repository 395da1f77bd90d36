"""safetensors: a length, a JSON header, the tensors' bytes. No checksum.

Rules: safetensors/src/tensor.rs and the format's text (https://github.com/huggingface/safetensors, README).
"""

from __future__ import annotations

import json
from typing import Any, TypeGuard

from ckptguard.errors import FormatError
from ckptguard.formats._base import Parsed, Source, Span, read_small_values
from ckptguard.model import Problem, Tensor
from ckptguard.values import MAX_DIMENSIONS

MAX_HEADER = 100_000_000

# name in the file: (torch's name, bits of one element)
DTYPES = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F4": ("float4_e2m1fn", 4),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
    "I16": ("int16", 16),
    "U16": ("uint16", 16),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "I32": ("int32", 32),
    "U32": ("uint32", 32),
    "F32": ("float32", 32),
    "C64": ("complex64", 64),
    "I64": ("int64", 64),
    "U64": ("uint64", 64),
    "F64": ("float64", 64),
}


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with its duplicates."""


def read(source: Source) -> Parsed:
    """Read a safetensors file's header. Raises FormatError, StoreError."""
    if source.size < 8:
        raise FormatError("truncated", f"{source.size} bytes are too few for a safetensors file")
    length = int.from_bytes(source.read(0, 8), "little")
    if length > MAX_HEADER:
        raise FormatError(
            "bad-header",
            f"the header claims {length} bytes, at most {MAX_HEADER} are allowed{_guess(source)}",
        )
    if 8 + length > source.size:
        raise FormatError(
            "truncated",
            f"the header of {length} bytes reaches past the end of the file at byte {source.size}",
        )
    header = _parse(source.read(8, length))
    problems: list[Problem] = []
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Any] = {}
    base = 8 + length
    for name, value in header:
        if name == "__metadata__":
            metadata = _metadata(value)
            continue
        tensor = _tensor(name, value, base)
        known = tensors.get(name)
        if known is not None and (known.start, known.nbytes) != (tensor.start, tensor.nbytes):
            raise FormatError("bad-header", f"tensor {name} is in the header twice, with different bytes")
        if known is not None:
            problems.append(
                Problem(
                    "bad-header",
                    name,
                    f"tensor {name} is in the header twice, with the same bytes",
                    "warning",
                    "none",
                )
            )
        tensors[name] = tensor
    _check_tiling(tensors.values(), base, source.size)
    everything = tuple(tensors.values())
    read_small_values(source, everything, overhead=4096)
    spans = tuple(Span(t.start or 0, t.nbytes, None, t.name) for t in everything if t.nbytes)
    return Parsed(
        "safetensors", dict(tensors), everything, (), tuple(problems), spans, details={"metadata": metadata}
    )


def _parse(raw: bytes) -> _Pairs:
    try:
        text = raw.decode("utf-8")
        header = json.loads(text, object_pairs_hook=_Pairs)
    except (UnicodeDecodeError, ValueError, RecursionError) as e:
        raise FormatError(
            "bad-header", f"the header of {len(raw)} bytes is no JSON ({type(e).__name__})"
        ) from e
    if not isinstance(header, _Pairs):
        raise FormatError("bad-header", "the header is no JSON object")
    return header


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, _Pairs) or not all(isinstance(v, str) for _, v in value):
        raise FormatError("bad-header", "__metadata__ does not map text to text")
    return dict(value)


def _tensor(name: str, value: Any, base: int) -> Tensor:
    entry = dict(value) if isinstance(value, _Pairs) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(
            "bad-header", f"tensor {name} has the dtype {str(dtype)[:40]!r}, which does not exist"
        )
    if (
        not _naturals(shape)
        or len(shape) > MAX_DIMENSIONS
        or not _naturals(offsets)
        or len(offsets) != 2
        or offsets[1] < offsets[0]
    ):
        raise FormatError("bad-header", f"tensor {name} has an impossible shape or impossible offsets")
    torch_name, bits = DTYPES[dtype]
    numel = 1
    for extent in shape:
        numel *= extent
    nbytes = offsets[1] - offsets[0]
    if numel * bits != 8 * nbytes:
        raise FormatError(
            "shape-mismatch",
            f"tensor {name}: {dtype} of shape {list(shape)} needs {numel * bits // 8} bytes, its offsets give {nbytes}",
        )
    tensor = Tensor(name, torch_name, tuple(shape), start=base + offsets[0], nbytes=nbytes, storage=name)
    if bits < 8:
        tensor.contiguous = False  # packed below a byte: checked by size only
    return tensor


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in value)


def _check_tiling(tensors: Any, base: int, size: int) -> None:
    at, before = base, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.start, t.nbytes)):
        if tensor.start != at:
            what = "overlaps" if tensor.start < at else f"leaves {tensor.start - at} bytes unused behind"
            raise FormatError("out-of-bounds", f"tensor {tensor.name} {what} {before}")
        at, before = tensor.start + tensor.nbytes, tensor.name
    if at > size:
        raise FormatError("truncated", f"the tensors end at byte {at}, the file at {size}")
    if at < size:
        raise FormatError(
            "size-mismatch", f"the tensors end at byte {at}, the file has {size - at} bytes more"
        )


def _guess(source: Source) -> str:
    """What the file probably is instead: the usual things that land under a weight file's name."""
    head = source.read(0, min(64, source.size))
    if head.startswith(b"version https://git-lfs"):
        return ": it is a git-lfs pointer, not the file itself (git lfs pull)"
    if head.lstrip()[:1] == b"<":
        return ": it looks like a web page, not like the file itself"
    if not head.strip(b"\0"):
        return ": the file begins with zeros"
    return ""

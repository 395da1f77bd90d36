"""safetensors: what the library writes is read as it was; every rule of its header is kept."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptguard.errors import FormatError
from ckptguard.formats import Parsed, safetensors
from ckptguard.formats._nested import Held

Open = Callable[..., Parsed]


def file_of(header: Any, payload: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + payload


def tensor(
    dtype: str = "F32", shape: list[int] | None = None, offsets: list[int] | None = None
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": offsets or [0, 8]}


def test_what_the_library_writes(tmp_path: Path, open_file: Open, array_of: Callable) -> None:
    torch.manual_seed(0)
    held = {
        "f64": torch.randn(3, dtype=torch.float64),
        "f32": torch.randn(3, 4),
        "f16": torch.randn(5).half(),
        "bf16": torch.randn(5).bfloat16(),
        "e4m3": torch.randn(6).to(torch.float8_e4m3fn),
        "e5m2": torch.randn(6).to(torch.float8_e5m2),
        "i64": torch.arange(4),
        "u8": torch.arange(4, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 3),
        "large": torch.randn(300, 200),
    }
    save_file(held, tmp_path / "m.safetensors", metadata={"format": "pt"})
    parsed = open_file(tmp_path / "m.safetensors", "safetensors")
    assert parsed.details["metadata"] == {"format": "pt"}
    for name, expected in held.items():
        ours = parsed.tree[name]
        assert (ours.dtype, ours.shape) == (str(expected.dtype).removeprefix("torch."), tuple(expected.shape))
        wide = (
            expected.float() if expected.dtype.is_floating_point and expected.dtype.itemsize < 4 else expected
        )
        np.testing.assert_array_equal(array_of(tmp_path / "m.safetensors", ours), wide.numpy(), err_msg=name)
    assert sum(s.length for s in parsed.spans) == sum(t.nbytes for t in held.values())


BROKEN: dict[str, tuple[str, bytes]] = {
    "shorter than its length field": ("truncated", b"\x05\x00\x00"),
    "a header beyond the file": ("truncated", struct.pack("<Q", 100) + b"{}"),
    "a header of a terabyte": ("bad-header", struct.pack("<Q", 1 << 40) + b"{}"),
    "no JSON": ("bad-header", file_of(b"\xff\xfe not json")),
    "deep JSON": ("bad-header", file_of(b"[" * 100_000)),
    "not an object": ("bad-header", file_of([1])),
    "an unknown dtype": ("bad-header", file_of({"w": tensor("F31")}, bytes(8))),
    "no dtype": ("bad-header", file_of({"w": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8))),
    "an entry that is text": ("bad-header", file_of({"w": "F32"}, bytes(8))),
    "a negative shape": ("bad-header", file_of({"w": tensor(shape=[-2])}, bytes(8))),
    "a fractional shape": ("bad-header", file_of({"w": {**tensor(), "shape": [2.0]}}, bytes(8))),
    "a boolean in the shape": ("bad-header", file_of({"w": {**tensor(), "shape": [True, 2]}}, bytes(8))),
    "a shape of more dimensions than exist": (
        "bad-header",
        file_of({"w": tensor(shape=[2] + [1] * 100)}, bytes(8)),
    ),
    "offsets in the wrong order": ("bad-header", file_of({"w": tensor(offsets=[8, 0])}, bytes(8))),
    "three offsets": ("bad-header", file_of({"w": tensor(offsets=[0, 4, 8])}, bytes(8))),
    "a shape for more bytes": ("shape-mismatch", file_of({"w": tensor(shape=[3])}, bytes(8))),
    "a shape whose product overflows": (
        "shape-mismatch",
        file_of({"w": tensor(shape=[1 << 32, 1 << 32])}, bytes(8)),
    ),
    "a hole before the first": ("out-of-bounds", file_of({"w": tensor(offsets=[8, 16])}, bytes(16))),
    "a hole between": ("out-of-bounds", file_of({"a": tensor(), "b": tensor(offsets=[12, 20])}, bytes(20))),
    "an overlap": ("out-of-bounds", file_of({"a": tensor(), "b": tensor(offsets=[4, 12])}, bytes(12))),
    "bytes behind the last": ("size-mismatch", file_of({"w": tensor()}, bytes(9))),
    "a payload too short": ("truncated", file_of({"w": tensor()}, bytes(7))),
    "the same name for other bytes": (
        "bad-header",
        file_of(
            b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
            bytes(16),
        ),
    ),
    "metadata that is no text": ("bad-header", file_of({"__metadata__": {"a": 1}})),
    "metadata that is a list": ("bad-header", file_of({"__metadata__": []})),
    "a git-lfs pointer": ("bad-header", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "a web page": ("bad-header", b"<!DOCTYPE html><html><body>404</body></html>"),
    "zeros": ("truncated", bytes(4)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str) -> None:
    code, data = BROKEN[name]
    with pytest.raises(FormatError) as error:
        safetensors.read(Held(data))
    assert error.value.code == code, str(error.value)


def test_a_lfs_pointer_is_called_by_its_name() -> None:
    with pytest.raises(FormatError, match="git lfs pull"):
        safetensors.read(Held(BROKEN["a git-lfs pointer"][1]))


def test_an_empty_file_is_allowed() -> None:
    assert safetensors.read(Held(file_of({}))).tensors == ()


def test_the_same_name_for_the_same_bytes_is_a_warning() -> None:
    data = file_of(
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    )
    assert [(p.code, p.severity) for p in safetensors.read(Held(data)).problems] == [
        ("bad-header", "warning")
    ]


@given(st.binary(max_size=200) | st.builds(file_of, st.binary(max_size=100), st.binary(max_size=30)))
def test_any_bytes_raise_one_error(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        safetensors.read(Held(data))


values = (
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 63)
    | st.text(max_size=5)
    | st.lists(st.integers(-1, 20), max_size=3)
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4", "U8", "X"]) | values,
        "shape": values,
        "data_offsets": values,
    },
)


@given(st.dictionaries(st.text(max_size=4), entries | values, max_size=4), st.integers(0, 40))
def test_any_header_raises_one_error(header: dict[str, Any], size: int) -> None:
    with contextlib.suppress(FormatError):
        parsed = safetensors.read(Held(file_of(header, bytes(size))))
        assert all(t.start + t.nbytes <= 8 + len(json.dumps(header)) + size for t in parsed.tensors)

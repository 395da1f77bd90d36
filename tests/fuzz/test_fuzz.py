"""The fuzz targets on kept cases and on changed real files: bounded here, longer under `make soak`."""

from __future__ import annotations

import importlib.util
import json
import pickle
import struct
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors

HERE = Path(__file__).parent


def _targets() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz_targets", HERE / "targets.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["fuzz_targets"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TARGETS: dict[str, Callable[[bytes], None]] = _targets().TARGETS
KEPT = sorted(p for p in (HERE / "cases").rglob("*") if p.is_file())


def _torch(**options: Any) -> bytes:
    torch.manual_seed(0)
    out = BytesIO()
    held = {
        "model": {"w": torch.randn(4, 3), "t": torch.randn(3, 2).t(), "h": torch.randn(5).half()},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4, 3)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "rng": np.random.RandomState(0).get_state(),
        "step": 3,
    }
    torch.save(held, out, **options)
    return out.getvalue()


def _metadata() -> bytes:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    return pickle.dumps(Metadata({"a": BytesStorageMetadata()}))


SEEDS: dict[str, list[bytes]] = {
    "torch": [_torch(), _torch(_use_new_zipfile_serialization=False), pickle.dumps({"model": {}})],
    "safetensors": [
        save_safetensors({"a": torch.randn(3, 2), "b": torch.zeros(4).bfloat16()}, {"format": "pt"})
    ],
    "json": [json.dumps({"global_step": 3, "log_history": [{"loss": 1.5}]}).encode()],
    "pickle": [pickle.dumps({"a": [1, (2, 3)], "b": np.arange(3)}, p) for p in range(6)],
    "pickles": [pickle.dumps({"a": [1, (2, 3)], "b": np.arange(3)}, p) for p in range(6)],
    "dcp-metadata": [_metadata()],
}


@pytest.mark.parametrize("case", KEPT, ids=lambda p: f"{p.parent.name}-{p.name[:12]}")
def test_kept_case(case: Path) -> None:
    TARGETS[case.parent.name](case.read_bytes())


@st.composite
def changed(draw: st.DrawFn, seed: bytes) -> bytes:
    """A real file with a few bytes changed, cut out, doubled, or a number made extreme."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["byte", "number", "cut", "double", "insert", "end"]))
        if kind == "byte" and data:
            data[at] = draw(st.integers(0, 255))
        elif kind == "number":
            value = draw(st.sampled_from([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFFE, 1 << 31]))
            data[at : at + 4] = struct.pack("<I", value)
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == "double":
            piece = data[at : at + draw(st.integers(1, 80))]
            data[at:at] = piece
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=12))
        else:
            del data[at:]
    return bytes(data)


def _hunt(name: str, examples: int) -> None:
    seeds = SEEDS.get(name, [b"", b"\0" * 64])

    @settings(max_examples=examples, deadline=None)
    @given(st.one_of([st.binary(max_size=300), *(changed(seed) for seed in seeds)]))
    def hunt(data: bytes) -> None:
        TARGETS[name](data)

    hunt()


@pytest.mark.parametrize("name", TARGETS)
def test_target(name: str) -> None:
    _hunt(name, 120)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_target_for_long(name: str) -> None:
    _hunt(name, 20_000)

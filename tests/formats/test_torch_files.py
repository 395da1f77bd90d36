"""Every kind of file that torch.save writes: our structure and numbers are torch's own."""

from __future__ import annotations

import collections
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptguard.errors import FormatError
from ckptguard.formats import Parsed
from ckptguard.formats.pickles import Opaque
from ckptguard.model import Tensor

Same = Callable[[Path], Parsed]
Open = Callable[..., Parsed]


class Tagged(torch.Tensor):
    """A tensor subclass, as quantisation and sharding libraries make them."""


class Settings:
    """A user's own class in a checkpoint."""

    def __init__(self) -> None:
        self.rate = 0.5


def rich() -> dict[str, object]:
    """Tensors of all the geometries and dtypes that checkpoints hold."""
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    tied = torch.randn(3, 5)
    return {
        "plain": torch.randn(7, 3),
        "view": base[2:5],
        "column": base[:, 3],
        "transposed": base.t(),
        "strided": torch.arange(40)[3::7],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "tied": [tied, {"again": tied}],
        "scalar": torch.tensor(3.5),
        "integer": torch.tensor(7),
        "empty": torch.empty(0),
        "hollow": torch.empty(4, 0, 2),
        "parameter": torch.nn.Parameter(torch.randn(4)),
        "frozen": torch.nn.Parameter(torch.randn(4), requires_grad=False),
        "buffer": torch.nn.Buffer(torch.randn(2)),
        "large": torch.randn(3000, 13),
    }


DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e5m2",
    "float8_e4m3fn",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex64",
    "complex128",
]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_geometries(legacy: bool, tmp_path: Path, same_as_torch: Same) -> None:
    path = tmp_path / "a.pt"
    torch.save(rich(), path, _use_new_zipfile_serialization=not legacy)
    parsed = same_as_torch(path)
    assert parsed.kind == ("torch-legacy" if legacy else "torch-zip")
    tied = parsed.tree["tied"]
    assert tied[0].storage == tied[1]["again"].storage
    assert tied[0].start == tied[1]["again"].start


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str, legacy: bool, tmp_path: Path, same_as_torch: Same) -> None:
    kind = getattr(torch, dtype)
    raw = torch.arange(-60, 60).to(torch.float32) / 7
    numbers = raw.to(kind) if dtype != "bool" else raw > 0
    if legacy and dtype in ("uint16", "uint32", "uint64", "float8_e5m2", "float8_e4m3fn"):
        pytest.skip("torch itself cannot write this dtype in the old format")
    path = tmp_path / "a.pt"
    torch.save(
        {"values": numbers.reshape(4, 30), "view": numbers[7:9]},
        path,
        _use_new_zipfile_serialization=not legacy,
    )
    same_as_torch(path)


def test_every_float8_value_is_the_one_that_torch_gives(
    tmp_path: Path, open_file: Open, array_of: Callable
) -> None:
    for dtype in ("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype))
        torch.save({"w": codes}, tmp_path / "a.pt")
        tensor = open_file(tmp_path / "a.pt").tree["w"]
        found = array_of(tmp_path / "a.pt", tensor)
        if found.dtype == np.uint8:  # kept as bits, where nothing claims to know them
            np.testing.assert_array_equal(found, np.arange(256, dtype=np.uint8))
        else:
            np.testing.assert_array_equal(found, codes.float().numpy())


def test_quantized(tmp_path: Path, same_as_torch: Same) -> None:
    torch.save({"q": torch.quantize_per_tensor(torch.randn(5, 4), 0.1, 2, torch.qint8)}, tmp_path / "a.pt")
    same_as_torch(tmp_path / "a.pt")


def test_conjugated_and_negated_views_are_opened(tmp_path: Path, open_file: Open) -> None:
    torch.save({"c": torch.randn(4, dtype=torch.complex64).conj()}, tmp_path / "a.pt")
    assert open_file(tmp_path / "a.pt").tensors[0].shape == (4,)


def test_meta_tensors_hold_no_bytes(tmp_path: Path, same_as_torch: Same) -> None:
    torch.save({"m": torch.empty(4, 4, device="meta"), "real": torch.ones(2)}, tmp_path / "a.pt")
    same_as_torch(tmp_path / "a.pt")


def test_subclasses_keep_their_tensor(tmp_path: Path, open_file: Open) -> None:
    torch.save({"t": torch.ones(3).as_subclass(Tagged)}, tmp_path / "a.pt")
    parsed = open_file(tmp_path / "a.pt")
    assert isinstance(parsed.tree["t"], Opaque)
    assert [t.shape for t in parsed.tensors] == [(3,)]


def test_sparse_tensors_show_their_parts(tmp_path: Path, open_file: Open) -> None:
    torch.save({"s": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    assert {t.shape for t in open_file(tmp_path / "a.pt").tensors} == {(2, 3), (3,)}


def test_without_checksums(tmp_path: Path, same_as_torch: Same) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(rich(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    parsed = same_as_torch(tmp_path / "a.pt")
    assert all(s.crc is None for s in parsed.spans if "/data/" in s.name and s.length)


def test_with_skipped_data_the_space_is_there(tmp_path: Path, open_file: Open) -> None:
    with torch.serialization.skip_data():
        torch.save({"w": torch.ones(100, 10)}, tmp_path / "a.pt")
    parsed = open_file(tmp_path / "a.pt")
    assert parsed.tensors[0].shape == (100, 10)
    assert not any(p.code in ("truncated", "out-of-bounds") for p in parsed.problems)


def test_big_endian_numbers_are_turned(tmp_path: Path, open_file: Open) -> None:
    import sys
    import unittest.mock

    with unittest.mock.patch.object(sys, "byteorder", "big"):
        torch.save({"step": torch.tensor(1234)}, tmp_path / "a.pt")
    if zipfile.ZipFile(tmp_path / "a.pt").read("a/byteorder") != b"big":
        pytest.skip("this torch does not write the mark")
    assert open_file(tmp_path / "a.pt").tree["step"].scalar() == torch.load(tmp_path / "a.pt")["step"].item()


def test_archives_of_other_zip_writers(tmp_path: Path, same_as_torch: Same) -> None:
    """zipfile puts no padding before payloads, and with force_zip64 long headers: torch loads both."""
    torch.save(rich(), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as one, zipfile.ZipFile(tmp_path / "b.pt", "w") as two:
        for info in one.infolist():
            with two.open(info.filename, "w", force_zip64=True) as record:
                record.write(one.read(info))
    same_as_torch(tmp_path / "b.pt")


def test_saved_to_an_open_file_and_with_another_protocol(tmp_path: Path, same_as_torch: Same) -> None:
    for protocol in (2, 3, 4, 5):
        with open(tmp_path / "a.pt", "wb") as file:
            torch.save(rich(), file, pickle_protocol=protocol)
        same_as_torch(tmp_path / "a.pt")


def test_numpy_values_of_every_protocol(tmp_path: Path, open_file: Open) -> None:
    held = {
        "array": np.arange(12, dtype=np.float32).reshape(3, 4),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "pair": (np.arange(3), 1),
        "single": (np.arange(3),),
        "scalar": np.float64(2.5),
        "integer": np.int32(7),
        "flag": np.bool_(True),
        "empty": np.empty((0, 3)),
        "big": np.arange(4, dtype=">i4"),
        "shared": [a := np.arange(5), a],
    }
    for protocol in (2, 3, 4, 5):
        torch.save(held, tmp_path / "a.pt", pickle_protocol=protocol)
        tree = open_file(tmp_path / "a.pt").tree
        for name in ("array", "fortran", "empty", "big"):
            np.testing.assert_array_equal(tree[name], held[name], err_msg=f"{name}, protocol {protocol}")
        np.testing.assert_array_equal(tree["pair"][0], held["pair"][0])
        np.testing.assert_array_equal(tree["single"][0], held["single"][0])
        np.testing.assert_array_equal(tree["shared"][1], held["shared"][1])
        assert (tree["scalar"], tree["integer"], tree["flag"]) == (2.5, 7, True), protocol


def test_the_objects_of_a_training_are_read_as_plain_data(tmp_path: Path, open_file: Open) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "config": Settings(),
            "ordered": collections.OrderedDict(a=1),
            "default": collections.defaultdict(list, a=[1]),
            "path": Path("runs/a"),
            "device": torch.device("cpu"),
            "dtype": torch.bfloat16,
            "size": torch.Size([2, 3]),
            "rng": torch.get_rng_state(),
            "set": {1, 2},
            "version": torch.__version__,
        },
        tmp_path / "a.pt",
    )
    parsed = open_file(tmp_path / "a.pt")
    tree = parsed.tree
    assert tree["model"]["weight"].shape == (2, 3)
    assert tree["optimizer"]["state"][0]["step"].scalar() == 1
    assert tree["config"].get("rate") == 0.5
    assert (tree["ordered"], tree["default"], tree["path"], tree["size"]) == (
        {"a": 1},
        {"a": [1]},
        "runs/a",
        (2, 3),
    )
    assert tree["rng"].value is not None
    assert not any(use.how == "called" for use in parsed.globals)


def test_legacy_views_of_one_storage(tmp_path: Path, same_as_torch: Same) -> None:
    base = torch.arange(100.0)
    torch.save(
        {"a": base[10:20], "b": base[50:60].reshape(2, 5)},
        tmp_path / "a.pt",
        _use_new_zipfile_serialization=False,
    )
    same_as_torch(tmp_path / "a.pt")


def test_a_file_within_a_file_ends_where_its_record_says(tmp_path: Path, open_file: Open) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    with open(tmp_path / "a.pt", "ab") as file:
        file.write(b"left over from a longer file")
    assert [p.code for p in open_file(tmp_path / "a.pt").problems] == ["unindexed-tensor"]


CUTS = {"nothing": 0, "a few bytes": 3, "the magic number": 64, "half": None, "all but one byte": -1}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("cut", CUTS)
def test_cut_files_say_so(cut: str, legacy: bool, tmp_path: Path, open_file: Open) -> None:
    path = tmp_path / "a.pt"
    torch.save(rich(), path, _use_new_zipfile_serialization=not legacy)
    data = path.read_bytes()
    at = CUTS[cut]
    path.write_bytes(data[: len(data) // 2 if at is None else at])
    with pytest.raises(FormatError) as error:
        open_file(path)
    assert error.value.code in ("truncated", "bad-header")
    assert str(error.value)


def test_tensor_values_that_were_read_are_whole(tmp_path: Path, open_file: Open) -> None:
    torch.save({"steps": [torch.tensor(float(i)) for i in range(200)]}, tmp_path / "a.pt")
    tree = open_file(tmp_path / "a.pt").tree
    assert [t.scalar() for t in tree["steps"]] == list(range(200))
    assert all(isinstance(t, Tensor) for t in tree["steps"])

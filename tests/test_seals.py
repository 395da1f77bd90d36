"""Seals: round trip, own digest, staleness by file identity, several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.errors import FormatError, StoreError
from ckptguard.model import Entry
from ckptguard.seals import (
    Probe,
    Seal,
    SealedFile,
    SealedTensor,
    merge,
    parse_seal,
    read_seal,
    seal_file,
    seal_key,
    write_seal,
)
from ckptguard.storage.local import LocalStore

TENSOR = SealedTensor(
    digest="aa" * 16, dtype="float32", shape=(2, 3), norm=float("nan"), minimum=float("-inf")
)


def example(**changes: object) -> Seal:
    values = {
        "checkpoint": "checkpoint-20", "sealed_by": "recorder", "created": 100.5, "step": 20, "attempt": 2, "ranks": (0,),
        "files": {"model.pt": SealedFile(size=3, modified=1.5, digest="bb" * 16, blocks=("cc" * 16,))},
        "tensors": {"model/w": TENSOR}, "tensors_from": "memory", "rng": {"0": {"torch": ("1", "2")}},
        "definitions": {"loss": "mean per token"}, "probe": Probe(loss=2.5),
    }  # fmt: skip
    return Seal.model_validate({**values, **changes, "schema": 1})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert read_seal(store, "", "checkpoint-20") is None
    key = write_seal(store, "", example())
    assert key == ".ckptguard/seals/checkpoint-20.json" and [p.name for p in tmp_path.iterdir()] == [
        ".ckptguard"
    ]
    again = read_seal(store, "", "checkpoint-20")
    assert again is not None and again.to_json() == example().to_json()
    assert again.tensors["model/w"].shape == (2, 3)


def test_a_seal_of_a_checkpoint_in_a_sub_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert seal_key("runs/a", "checkpoints/step-10") == "runs/a/.ckptguard/seals/checkpoints/step-10.json"
    write_seal(store, "runs/a", example(checkpoint="checkpoints/step-10"))
    assert read_seal(store, "runs/a", "checkpoints/step-10") is not None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_seal_is_told_from_a_damaged_checkpoint(at: int, bits: int) -> None:
    data = bytearray(example().to_json())
    data[at % len(data)] ^= bits
    try:
        again = parse_seal(bytes(data))
    except FormatError:
        return
    # Only white space was changed.
    assert again.to_json() == example().to_json()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "expected an object, found list"),
        (b'{"schema": 2}', "schema 2; this version reads 1"),
        (b'{"schema": 1}', "states digest None"),
    ],
)
def test_junk_has_its_own_error(data: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        parse_seal(data)


def test_a_later_version_may_add_keys() -> None:
    body = json.loads(example().to_json())
    body.pop("digest")
    from ckptguard.seals import _own_digest

    body["signature"] = {"by": "someone"}
    assert parse_seal(json.dumps({**body, "digest": _own_digest(body)}).encode()).step == 20


def test_staleness_is_by_identity(tmp_path: Path) -> None:
    tmp_path.joinpath("a.pt").write_bytes(b"x" * 100)
    store = LocalStore(tmp_path)
    sealed = seal_file(store, store.stat("a.pt"), block_size=64)
    assert len(sealed.blocks) == 2 and sealed.fits(store.stat("a.pt"))
    tmp_path.joinpath("a.pt").write_bytes(b"y" * 101)
    entry = LocalStore(tmp_path).stat("a.pt")
    assert not sealed.fits(entry)
    seal = example(files={"a.pt": sealed})
    assert seal.stale_for({"a.pt": entry}) and not example(files={}).stale_for({"a.pt": entry})
    tagged = SealedFile(size=3, modified=1.0, etag="t", digest="")
    assert tagged.fits(Entry("a", 3, 9.0, etag="t")) and not tagged.fits(Entry("a", 3, 1.0, etag="u"))


def test_ranks_are_merged(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    other = TENSOR.model_copy(update={"digest": "dd" * 16})
    for rank in (0, 1, 10):
        tensors = {"model/w": TENSOR, "optimizer/m": TENSOR if rank != 1 else other}
        seal = example(
            ranks=(rank,), rng={str(rank): {"torch": (str(rank),)}}, tensors=tensors, attempt=2 + (rank == 1)
        )
        write_seal(store, "", seal, rank=rank)
    write_seal(store, "", example(ranks=(11,), created=-9999.0), rank=11)
    seal = read_seal(store, "", "checkpoint-20")
    assert seal is not None and seal.ranks == (0, 1, 10) and set(seal.rng) == {"0", "1", "10"}
    assert set(seal.tensors) == {"model/w", "optimizer/m", "optimizer/m@rank-1"}
    assert merge([example()]).to_json() == example().to_json()


def test_a_key_that_leads_outside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a key below"):
        write_seal(LocalStore(tmp_path), "", example(checkpoint="../../x"))

"""The pieces of evidence: draws, fingerprints, fixed batches, digests in memory, the feed of a hidden loop."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckptguard.digest import tensor_digest
from ckptguard.errors import FormatError
from ckptguard.logs.steplog import StepLog, StepLogWriter
from ckptguard.record import Recorder
from ckptguard.record.batches import FixedBatches, StepBatches, copied, unpack
from ckptguard.record.feed import Feed, MarkedBatch
from ckptguard.record.fingerprints import OnDevice, fingerprint, join_fingerprints
from ckptguard.record.loader import WatchedLoader
from ckptguard.record.pending import PendingRows
from ckptguard.record.rng import next_draws
from ckptguard.record.tensors import sealed_tensors


def test_draws_are_the_next_ones_and_disturb_nothing() -> None:
    own = {
        "loader": torch.Generator().manual_seed(3),
        "sampler": np.random.default_rng(4),
        "augment": random.Random(5),
    }
    first = next_draws(own)
    assert next_draws(own) == first and set(first) >= {
        "python",
        "numpy",
        "torch",
        "loader",
        "sampler",
        "augment",
    }

    def words(numbers: Any) -> tuple[str, ...]:
        return tuple(f"{int(n):08x}" for n in numbers)

    assert words(random.getrandbits(32) for _ in range(4)) == first["python"]
    assert words(torch.randint(0, 2**32, (4,))) == first["torch"]
    assert words(torch.randint(0, 2**32, (4,), generator=own["loader"])) == first["loader"]
    assert words(own["sampler"].integers(0, 2**32, 4, dtype=np.uint64)) == first["sampler"]
    assert next_draws()["python"] != first["python"]


def test_a_fingerprint_is_of_the_content() -> None:
    batch = {"x": torch.arange(6).reshape(2, 3), "text": ["a", "b"]}
    same = {"text": ["a", "b"], "x": np.arange(6).reshape(2, 3)}
    assert fingerprint(batch) == fingerprint(same) == fingerprint(batch)
    assert fingerprint(batch["x"].T.contiguous().T) == fingerprint(batch["x"])
    others = [
        {"x": torch.arange(6).reshape(3, 2), "text": ["a", "b"]},
        {"x": torch.arange(6, dtype=torch.int32).reshape(2, 3), "text": ["a", "b"]},
        {"x": torch.arange(6).reshape(2, 3), "text": ["ab"]},
        {"y": torch.arange(6).reshape(2, 3), "text": ["a", "b"]},
        [torch.arange(6).reshape(2, 3), ["a", "b"]],
    ]
    assert len({fingerprint(other) for other in [batch, *others]}) == 6
    assert fingerprint(torch.tensor([1.5], dtype=torch.bfloat16)) != fingerprint(
        torch.tensor([1.5], dtype=torch.float16)
    )
    with pytest.raises(OnDevice):
        fingerprint({"x": torch.empty(3, device="meta")})


def test_a_batch_of_a_class_of_its_own() -> None:
    @dataclass
    class Batch:
        tokens: torch.Tensor

    class Opaque:
        pass

    assert fingerprint(Batch(torch.ones(2))) == fingerprint({"tokens": torch.ones(2)})
    assert fingerprint([torch.ones(2), Opaque()]) == fingerprint([torch.ones(2), Opaque()])
    # Any two of them would be equal, and a replay on other data would pass for proven.
    with pytest.raises(TypeError, match="nothing can be read of a batch of the class"):
        fingerprint(Opaque())
    with pytest.raises(TypeError):
        fingerprint({"graph": Opaque()})


def test_fingerprints_are_joined_in_order() -> None:
    assert (
        join_fingerprints([]) is None
        and join_fingerprints(["a"]) == "a"
        and join_fingerprints(["a", "b"]) != "a"
    )


LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.text(max_size=5)
    | hnp.arrays(hnp.integer_dtypes(sizes=(8, 32, 64)) | hnp.floating_dtypes(sizes=(32, 64)), hnp.array_shapes(max_dims=2, max_side=3))
    | st.lists(st.integers(0, 9), min_size=1, max_size=4).map(torch.tensor)
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    )
)
def test_what_is_kept_comes_back(batch: Any) -> None:
    fixed = FixedBatches("x", 8, 1 << 20)
    mark = fingerprint(batch)
    assert fixed.add(copied(StepBatches(3, (batch, batch), mark)))
    (again,) = unpack(fixed.pack())
    assert (again.step, again.fingerprint) == (3, mark) and [fingerprint(m) for m in again.micro_batches] == [
        mark,
        mark,
    ]


def test_fixed_batches_are_bounded_and_their_own() -> None:
    fixed = FixedBatches("x", 8, 1000)
    batch = torch.zeros(100)
    assert fixed.add(copied(StepBatches(1, (batch,)))) and fixed.add(copied(StepBatches(2, (batch,))))
    batch.fill_(7.0)
    assert not fixed.add(copied(StepBatches(3, (batch,)))) and fixed.full
    kept = unpack(fixed.pack())
    assert [step.step for step in kept] == [1, 2] and not kept[0].micro_batches[0].any()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400))
def test_junk_is_no_batches(junk: bytes, cut: int) -> None:
    fixed = FixedBatches("x", 8, 1 << 20)
    fixed.add(StepBatches(1, ({"a": torch.arange(3)},)))
    whole = fixed.pack()
    for data in (junk, whole[: min(cut, len(whole) - 1)], b"\x10" + b"\0" * 7 + junk):
        with pytest.raises(FormatError, match=r"no fixed batches|schema"):
            unpack(data)


def test_digests_in_memory_are_those_of_the_state_dictionary() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
            self.b = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
            self.b.weight = self.a.weight
            self.register_buffer("kept", torch.arange(3))
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

    model = Tied()
    state = model.state_dict()
    sealed = sealed_tensors({"model": model})
    assert set(sealed) == {f"model/{name}" for name in state}
    for name, tensor in state.items():
        assert sealed[f"model/{name}"].digest == tensor_digest(tensor.contiguous().view(torch.uint8).numpy())
    weight = sealed["model/a.weight"]
    assert (weight.dtype, weight.shape) == ("bfloat16", (4, 4))
    assert weight.norm == pytest.approx(float(state["a.weight"].float().norm()), rel=1e-3)


def test_a_watched_loader_is_the_loader() -> None:
    class Loader(list[int]):
        def state_dict(self) -> dict[str, int]:
            return {"at": 3}

    seen: list[Any] = []
    watched = WatchedLoader(Loader([1, 2, 3]), lambda batch, waited: seen.append(batch))
    assert len(watched) == 3 and watched.state_dict() == {"at": 3}
    batches = iter(watched)
    assert next(batches) == 1 and seen == [1]  # as consumed: never ahead
    assert list(batches) == [2, 3] and seen == [1, 2, 3] and list(watched) == [1, 2, 3]


def test_a_feed_counts_what_is_moved_not_what_is_put_together() -> None:
    data = [{"x": torch.tensor(n)} for n in range(8)]
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    feed, own = Feed(), loader.collate_fn
    feed.attach(loader)
    batches = list(loader)
    assert isinstance(batches[0], MarkedBatch) and batches[0].x.tolist() == [0, 1]
    assert [b.to("cpu")["x"].tolist() for b in batches[:3]] == [[0, 1], [2, 3], [4, 5]]
    batches[0].to("cpu")  # moved again: not consumed again
    taken = feed.take(2)
    assert [mark for mark, _ in taken] == [
        fingerprint({"x": torch.tensor([0, 1])}),
        fingerprint({"x": torch.tensor([2, 3])}),
    ]
    assert feed.take(2) == []
    feed.detach()
    assert loader.collate_fn is own


@pytest.mark.hf
@pytest.mark.parametrize("skip", [0, 2])
def test_a_loader_that_accelerate_prepared(tmp_path: Path, skip: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    data = [{"x": torch.tensor(n), "y": torch.tensor(-n)} for n in range(10)]
    loader = accelerate.Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(data, batch_size=2))
    if skip:
        loader = accelerate.skip_first_batches(loader, skip)
    with Recorder(tmp_path) as recorder:
        for step, batch in enumerate(recorder.watch(loader), 1):
            assert batch["x"].tolist() == [2 * (step + skip) - 2, 2 * (step + skip) - 1]
            recorder.step(step)
    rows = StepLog().rows((tmp_path / ".ckptguard/steps-0.jsonl").read_bytes())
    expected = [
        fingerprint({"x": torch.tensor([n, n + 1]), "y": -torch.tensor([n, n + 1])})
        for n in range(2 * skip, 10, 2)
    ]
    assert [row.extra["batch"] for row in rows if "event" not in row.extra] == expected


def test_rows_wait_their_turn(tmp_path: Path) -> None:
    with StepLogWriter(tmp_path / "steps-0.jsonl") as log:
        rows = PendingRows(log)
        rows.add(
            1, {"loss": torch.tensor(1.5), "none": None, "many": np.arange(2)}, {"batch": "a", "ids": None}
        )
        rows.add(2, {"loss": torch.empty((), device="meta")}, {})
        rows.add(3, {"loss": 2.0}, {})
        lines = (tmp_path / "steps-0.jsonl").read_text().splitlines()
    assert (
        len(lines) == 1 and '"loss":1.5' in lines[0] and '"many":[0,1]' in lines[0] and "none" not in lines[0]
    )

"""The Recorder in a plain loop: what it writes, that it changes nothing, that it never kills a training."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckptguard.digest import tensor_digest
from ckptguard.logs.steplog import StepLog
from ckptguard.model import LogRow
from ckptguard.record import Recorder, fingerprint, next_draws
from ckptguard.record.batches import unpack
from ckptguard.seals import Seal, read_seal
from ckptguard.storage.local import LocalStore


def run(training: Any, recorder: Recorder | None, folder: Path, steps: int = 20, every: int = 5) -> str:
    """Train; the fingerprint of the final state, random generators included."""
    step = 0
    folder.mkdir(parents=True, exist_ok=True)
    while step < steps:
        for batch in recorder.watch(training.loader) if recorder else training.loader:
            loss, norm = training.step(batch)
            step += 1
            if recorder:
                recorder.step(step, loss=loss, grad_norm=norm)
            training.scheduler.step()
            if step % every == 0:
                path = folder / f"step-{step}.pt"
                if recorder:
                    with recorder.save(path, step):
                        torch.save(training.state(), path)
                else:
                    torch.save(training.state(), path)
            if step == steps:
                break
    return fingerprint(training.state())


def rows_of(folder: Path, rank: int = 0) -> tuple[LogRow, ...]:
    return StepLog().rows((folder / ".ckptguard" / f"steps-{rank}.jsonl").read_bytes())


def seal_of(folder: Path, name: str) -> Seal:
    seal = read_seal(LocalStore(folder), "", name)
    assert seal is not None
    return seal


def test_a_recorded_training_is_the_same_training(training: Any, tmp_path: Path) -> None:
    def probe() -> torch.Tensor:
        torch.rand(3), np.random.rand(3)
        return training.model(torch.ones(4, 8)).sum()

    again = type(training)()
    plain = run(again, None, tmp_path / "plain")
    training = type(training)()
    with Recorder(tmp_path / "recorded", training.parts, probe=probe) as recorder:
        recorded = run(training, recorder, tmp_path / "recorded")
    assert recorded == plain
    assert recorder.aside is None
    listed = sorted(path.name for path in (tmp_path / "recorded").iterdir() if path.name != ".ckptguard")
    assert listed == sorted(path.name for path in (tmp_path / "plain").iterdir())


def test_what_is_recorded(training: Any, tmp_path: Path) -> None:
    definitions = {"loss": "mean per sample", "clip": 1.0}
    with Recorder(
        tmp_path,
        training.parts,
        definitions=definitions,
        probe=lambda: training.model(torch.ones(2, 8)).sum(),
    ) as recorder:
        run(training, recorder, tmp_path)
    rows = rows_of(tmp_path)
    steps = [row for row in rows if row.loss is not None]
    assert [row.step for row in steps] == list(range(1, 21))
    assert steps[0].lr == 1e-2 and steps[1].lr == pytest.approx(0.00955) and steps[0].loss_scale == 1024.0
    assert all(
        len(row.extra["batch"]) == 32 and row.grad_norm and row.extra["step_time"] > 0 for row in steps
    )
    events = [row.extra["event"] for row in rows if "event" in row.extra]
    assert events[0] == "start" and sorted(events[1:]) == ["save"] * 4 + ["sealed"] * 4
    assert rows[0].extra["definitions"]["clip"] == 1.0

    seal = seal_of(tmp_path, "step-20.pt")
    assert (seal.step, seal.attempt, seal.sealed_by, seal.tensors_from) == (20, 1, "recorder", "memory")
    assert seal.definitions["loss"] == "mean per sample" and seal.versions["torch"] == torch.__version__
    assert seal.files["step-20.pt"].size == (tmp_path / "step-20.pt").stat().st_size
    assert seal.files["step-20.pt"].fits(LocalStore(tmp_path).stat("step-20.pt"))
    saved = torch.load(tmp_path / "step-20.pt", weights_only=False)
    weight = saved["model"]["0.weight"]
    assert seal.tensors["model/0.weight"].digest == tensor_digest(weight.numpy())
    assert seal.tensors["model/0.weight"].norm == pytest.approx(float(weight.norm()), rel=1e-5)
    assert set(saved["model"]) == {
        name.removeprefix("model/") for name in seal.tensors if name.startswith("model/")
    }
    moment = saved["optimizer"]["state"][0]["exp_avg"]
    assert seal.tensors["optimizer/state.0.exp_avg"].digest == tensor_digest(moment.numpy())
    assert seal.probe is not None and seal.timings["save"] > 0

    # The recorded draws are those that a generator restored from the file will make.
    torch.set_rng_state(saved["rng"]["torch"])
    np.random.set_state(saved["rng"]["numpy"])
    drawn = next_draws()
    assert dict(seal.rng["0"])["torch"] == drawn["torch"] and dict(seal.rng["0"])["numpy"] == drawn["numpy"]
    assert tuple(f"{int(n):08x}" for n in torch.randint(0, 2**32, (4,))) == drawn["torch"]


def test_the_batches_after_a_save_are_kept(training: Any, tmp_path: Path) -> None:
    with Recorder(tmp_path, training.parts) as recorder:
        run(training, recorder, tmp_path, steps=20, every=10)
    steps = unpack((tmp_path / ".ckptguard/batches/step-10.pt.safetensors").read_bytes())
    assert [step.step for step in steps] == list(range(11, 19))
    logged = {row.step: row.extra["batch"] for row in rows_of(tmp_path) if row.loss is not None}
    assert all(fingerprint(step.micro_batches[0]) == logged[step.step] == step.fingerprint for step in steps)
    assert seal_of(tmp_path, "step-10.pt").batches == ".ckptguard/batches/step-10.pt.safetensors"
    assert not (tmp_path / ".ckptguard/batches/step-20.pt.safetensors").exists()

    # A checkpoint that was rotated away takes its batches along; a second save of a name replaces them.
    (tmp_path / "step-10.pt").unlink()
    with Recorder(tmp_path, training.parts, batches=0) as recorder:
        assert recorder.attempt == 2
        recorder.saved(tmp_path / "step-20.pt", 20)
    assert not (tmp_path / ".ckptguard/batches/step-10.pt.safetensors").exists()
    assert seal_of(tmp_path, "step-20.pt").batches is None


def test_accumulated_micro_batches_are_one_step(tmp_path: Path) -> None:
    micro = [{"input_ids": torch.arange(4) + n, "text": ["a", "b"]} for n in range(4)]
    with Recorder(tmp_path) as recorder:
        for n, batch in enumerate(recorder.watch(micro)):
            if n % 2:
                recorder.step(n // 2 + 1, loss=torch.tensor(1.5), ids=[n - 1, n])
    first, second = (row for row in rows_of(tmp_path) if row.loss is not None)
    assert first.extra["batch"] != second.extra["batch"] and second.extra["ids"] == [2, 3]


def test_numbers_on_a_device_are_not_read_at_the_step(tmp_path: Path) -> None:
    """A meta tensor cannot be read at all: whoever reads it at the step fails there."""
    with Recorder(tmp_path) as recorder:
        recorder.step(1, loss=torch.tensor(1.0))
        recorder.step(2, loss=torch.empty((), device="meta"))
        recorder.step(3, loss=torch.tensor(1.0))
        assert recorder.aside is None and [
            row.step for row in rows_of(tmp_path) if "event" not in row.extra
        ] == [1]
        recorder.flush()
        assert recorder.aside is not None


def test_no_operation_on_tensors_at_a_step_but_reading_scalars(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    loss, norm, batch = torch.tensor(1.0, requires_grad=True) * 2, torch.tensor(3.0), torch.arange(100)
    with Recorder(tmp_path) as recorder, Watch():
        recorder.consumed(batch)
        recorder.step(1, loss=loss, grad_norm=norm)
    assert set(seen) <= {
        "aten.detach.default",
        "aten._local_scalar_dense.default",
        "aten.view.default",
        "aten.view.dtype",
    }


def test_the_own_time_of_a_step(training: Any, tmp_path: Path) -> None:
    with Recorder(tmp_path, training.parts) as recorder:
        run(training, recorder, tmp_path, steps=200, every=1000)
    # How long it may be is for benchmarks/recorder.py: here other work may stretch any time.
    assert recorder.overhead.steps == 200
    assert 0 < recorder.overhead.mean <= recorder.overhead.worst <= recorder.overhead.total


@pytest.mark.parametrize("trouble", ["file-in-the-way", "disk-full", "odd-value", "odd-parts"])
def test_a_failing_recorder_says_so_once(
    trouble: str,
    training: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if trouble == "file-in-the-way":
        (folder / ".ckptguard").write_text("not a folder")
    parts = [training.parts] if trouble == "odd-parts" else training.parts
    with caplog.at_level(logging.WARNING), Recorder(folder, parts) as recorder:
        if trouble == "disk-full":
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, recorder._log._fd)
            os.close(full)
        if trouble == "odd-value":
            recorder.step(1, loss=torch.ones(3))
        run(training, recorder, folder, steps=8, every=4)
        assert recorder.aside is not None
    assert (folder / "step-8.pt").exists()
    assert len([r for r in caplog.records if r.name == "ckptguard.record"]) == 1


def test_a_definition_may_be_any_object(training: Any, tmp_path: Path) -> None:
    with Recorder(tmp_path, training.parts, definitions={"precision": torch.bfloat16}) as recorder:
        run(training, recorder, tmp_path, steps=2, every=2)
        assert recorder.aside is None
    assert seal_of(tmp_path, "step-2.pt").definitions["precision"] == "torch.bfloat16"


def test_a_failing_probe_costs_only_itself(
    training: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def probe() -> float:
        training.model[1].running_mean.fill_(7.0)
        raise RuntimeError("out of patience")

    before = training.model[1].running_mean.clone()
    training.model[2].eval()
    with Recorder(tmp_path, training.parts, probe=probe) as recorder:
        with recorder.save(tmp_path / "a.pt", 1):
            torch.save(training.state(), tmp_path / "a.pt")
        with recorder.save(tmp_path / "a.pt", 2):
            torch.save(training.state(), tmp_path / "a.pt")
    assert torch.equal(training.model[1].running_mean, before)
    assert training.model.training and not training.model[2].training
    assert recorder.aside is None and seal_of(tmp_path, "a.pt").step == 2
    assert [r.getMessage() for r in caplog.records] == [
        "ckptguard goes on without the probe: RuntimeError: out of patience"
    ]


def test_what_a_save_raises_is_raised_and_noted(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="No space"),
        Recorder(tmp_path) as recorder,
        recorder.save(tmp_path / "x.pt", 7),
    ):
        raise OSError(28, "No space left on device")
    events = {row.extra["event"]: row for row in rows_of(tmp_path)}
    assert events["save-failed"].step == 7 and "No space" in events["save-failed"].extra["error"]
    assert read_seal(LocalStore(tmp_path), "", "x.pt") is None


def test_a_checkpoint_elsewhere_gets_no_seal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Recorder(tmp_path / "run") as recorder:
        recorder.saved(tmp_path / "elsewhere.pt", 1)
        recorder.saved(tmp_path / "run" / ".." / "elsewhere.pt", 1)
    assert recorder.aside is None and "does not lie below the run" in caplog.text
    assert not list((tmp_path / "run/.ckptguard").rglob("*.json"))


def test_two_ranks_write_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    for rank in (0, 1):
        (folder / f"rank{rank}.bin").write_bytes(bytes([rank]) * 100)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        with Recorder(tmp_path) as recorder:
            recorder.step(1, loss=1.0 + rank)
            recorder.saved(folder, 1)
    seal = seal_of(tmp_path, "step-1")
    assert (
        seal.ranks == (0, 1) and set(seal.rng) == {"0", "1"} and set(seal.files) == {"rank0.bin", "rank1.bin"}
    )
    assert seal.topology["world_size"] == 2
    assert [row.loss for row in rows_of(tmp_path, 1) if row.loss] == [2.0]


LOOP = """
import sys, torch
from ckptguard.record import Recorder
torch.set_num_threads(1)
run = sys.argv[1]
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())
recorder = Recorder(run, {"model": model, "optimizer": optimizer})
for step, batch in enumerate(recorder.watch(torch.randn(4, 256) for _ in range(10**6)), 1):
    loss = model(batch).pow(2).mean(); loss.backward(); optimizer.step(); optimizer.zero_grad()
    recorder.step(step, loss=loss)
    if step == 4:
        print("go", flush=True)
    if step % 10 == 0:
        with recorder.save(f"{run}/a.pt", step):
            torch.save(model.state_dict(), f"{run}/a.pt")
"""


def test_kill_at_any_moment_leaves_a_readable_log(tmp_path: Path) -> None:
    for attempt in (1, 2):
        process = subprocess.Popen([sys.executable, "-c", LOOP, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        time.sleep(0.11 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    lines = (tmp_path / ".ckptguard/steps-0.jsonl").read_bytes().splitlines()
    rows = [json.loads(line) for line in lines]  # every line, also the last one of each attempt
    assert {row["attempt"] for row in rows} == {1, 2}
    for attempt in (1, 2):
        steps = [row["step"] for row in rows if row["attempt"] == attempt and "event" not in row]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > 3
    read_seal(LocalStore(tmp_path), "", "a.pt")
    for batches in (tmp_path / ".ckptguard/batches").glob("*.safetensors"):
        unpack(batches.read_bytes())

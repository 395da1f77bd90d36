"""The Recorder under the real Trainer, on a fixed Markov chain: one line, and nothing of the training changes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptguard.logs.steplog import StepLog
from ckptguard.model import LogRow
from ckptguard.record.batches import unpack
from ckptguard.record.fingerprints import fingerprint
from ckptguard.seals import read_seal
from ckptguard.storage.local import LocalStore

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.hf

VOCABULARY, LENGTH = 16, 12


def chain(samples: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of a Markov chain: a small model learns it within a few steps."""
    rng = np.random.default_rng(5)
    table = rng.dirichlet(np.full(VOCABULARY, 0.1), VOCABULARY)
    rows = []
    for _ in range(samples):
        ids = [int(rng.integers(VOCABULARY))]
        while len(ids) < LENGTH:
            ids.append(int(rng.choice(VOCABULARY, p=table[ids[-1]])))
        rows.append({"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)})
    return rows


def train(
    output: Path, *, recorded: bool = True, steps: int = 8, resume: bool = False, **arguments: Any
) -> Any:
    from ckptguard.record.hf import RecorderCallback

    transformers.set_seed(3)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2
    )
    args = transformers.TrainingArguments(
        output_dir=str(output), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, **arguments,
    )  # fmt: skip
    callbacks = [RecorderCallback(probe=lambda model: model(**batch()).loss)] if recorded else []
    data = chain(24)

    def batch() -> dict[str, torch.Tensor]:
        return {key: torch.stack([row[key] for row in data[:4]]) for key in data[0]}

    model = transformers.GPT2LMHeadModel(config)
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def rows_of(output: Path) -> list[LogRow]:
    return list(StepLog().rows((output / ".ckptguard/steps-0.jsonl").read_bytes()))


def listing(output: Path) -> set[str]:
    return {
        path.relative_to(output).as_posix() for path in output.rglob("*") if ".ckptguard" not in path.parts
    }


def history(trainer: Any) -> list[tuple[int, float, float]]:
    return [(h["step"], h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]


def test_one_line_records_all_and_changes_nothing(tmp_path: Path) -> None:
    options = {"save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 3}
    plain = train(tmp_path / "plain", recorded=False, **options)
    trainer = train(tmp_path / "run", **options)
    assert history(trainer) == history(plain)
    assert listing(tmp_path / "run") == listing(tmp_path / "plain")
    assert fingerprint(trainer.model.state_dict()) == fingerprint(plain.model.state_dict())

    rows = rows_of(tmp_path / "run")
    steps = [row for row in rows if row.loss is not None]
    assert [(row.step, row.loss, row.grad_norm) for row in steps] == history(plain)
    rates = [h["learning_rate"] for h in plain.state.log_history if "loss" in h]
    assert [row.lr for row in steps] == rates
    assert len({row.extra["batch"] for row in steps[:6]}) == 6
    events = [row.extra.get("event") for row in rows]
    assert events.count("save") == 4 and events.count("evaluate") == 3
    assert rows[0].extra["definitions"]["clip"] == 1.0

    seal = read_seal(LocalStore(tmp_path / "run"), "", "checkpoint-8")
    assert seal is not None and seal.step == 8 and seal.probe is not None
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"} <= set(seal.files)
    assert seal.tensors["model/lm_head.weight"] == seal.tensors["model/transformer.wte.weight"]
    assert "optimizer/state.0.exp_avg" in seal.tensors


def test_a_resume_repeats_the_same_batches(tmp_path: Path) -> None:
    train(tmp_path, steps=8, gradient_accumulation_steps=2)
    first = {row.step: row for row in rows_of(tmp_path) if row.loss is not None}
    kept = unpack((tmp_path / ".ckptguard/batches/checkpoint-4.safetensors").read_bytes())
    assert [step.step for step in kept] == [5, 6, 7, 8] and len(kept[0].micro_batches) == 2
    assert kept[0].fingerprint == first[5].extra["batch"] and set(kept[0].micro_batches[0]) == {
        "input_ids",
        "labels",
    }

    for name in ("checkpoint-6", "checkpoint-8"):
        (tmp_path / name).rename(tmp_path.parent / f"{tmp_path.name}-{name}")
    train(tmp_path, steps=8, gradient_accumulation_steps=2, resume=True)
    again = {row.step: row for row in rows_of(tmp_path) if row.loss is not None and row.attempt == 2}
    assert sorted(again) == [5, 6, 7, 8]
    for step, row in again.items():
        assert (row.extra["batch"], row.loss, row.lr) == (
            first[step].extra["batch"],
            first[step].loss,
            first[step].lr,
        )
    resumed = next(row for row in rows_of(tmp_path) if row.extra.get("event") == "resume")
    assert (resumed.step, resumed.attempt) == (4, 2)


def test_fingerprints_travel_from_worker_processes(tmp_path: Path) -> None:
    train(tmp_path / "here", steps=3, logging_strategy="no")
    train(tmp_path / "workers", steps=3, dataloader_num_workers=2)
    here = [row.extra["batch"] for row in rows_of(tmp_path / "here") if "event" not in row.extra]
    workers = [row.extra["batch"] for row in rows_of(tmp_path / "workers") if "event" not in row.extra]
    assert len(here) == 3 and here == workers


def test_a_failing_recorder_does_not_fail_the_trainer(tmp_path: Path) -> None:
    tmp_path.joinpath(".ckptguard").write_text("in the way")
    train(tmp_path, steps=2)
    assert json.loads((tmp_path / "checkpoint-2/trainer_state.json").read_text())["global_step"] == 2


def test_frameworks_still_find_the_newest_checkpoint(tmp_path: Path) -> None:
    """What users and frameworks do to pick one: the Trainer's own search, a sorted glob, torchtitan's search of names."""
    train(tmp_path, steps=10, save_total_limit=3)
    from transformers.trainer_utils import get_last_checkpoint

    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert (
        sorted(tmp_path.glob("checkpoint-*"))[-1].name == "checkpoint-8"
    )  # as a string: the user's own problem
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"checkpoint-6", "checkpoint-8", "checkpoint-10"}
    # torchtitan lists the folder itself and takes what holds step-N: our folder's name must not.
    assert not any(re.search(r"step-(\d+)", path.name) for path in tmp_path.iterdir())

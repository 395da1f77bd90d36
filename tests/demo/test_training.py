"""The demo's training and its recipe: a resume continues it bit for bit, and the recipe repeats what was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptguard.demo.recipe import Recipe
from ckptguard.demo.training import load_state, train
from ckptguard.logs.steplog import StepLog
from ckptguard.model import LogRow
from ckptguard.record import fingerprint
from ckptguard.record.batches import unpack
from ckptguard.seals import read_seal
from ckptguard.storage.local import LocalStore


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "run"
    train(folder, steps=14, every=6)
    return folder


def rows(run: Path, attempt: int = 1) -> dict[int, LogRow]:
    found = StepLog().rows((run / ".ckptguard/steps-0.jsonl").read_bytes())
    return {row.step: row for row in found if row.attempt == attempt and row.loss is not None}


def test_the_recipe_repeats_what_was_recorded(run: Path) -> None:
    recipe = Recipe()
    for stored in (False, True):
        parts = recipe.build("cpu")
        assert load_state(parts, run / "step-6.pt") == 6
        seal = read_seal(LocalStore(run), "", "step-6.pt")
        assert seal is not None and seal.probe is not None
        parts["model"].eval()
        assert recipe.probe(parts) == seal.probe.loss
        kept = unpack((run / ".ckptguard/batches/step-6.pt.safetensors").read_bytes())
        for batches in kept[:4]:
            numbers = recipe.step_on(parts, batches.micro_batches) if stored else recipe.step(parts)
            row = rows(run)[batches.step]
            assert (float(numbers["loss"]), float(numbers["grad_norm"]), numbers["lr"], numbers["loss_scale"]) == (
                row.loss, row.grad_norm, row.lr, row.loss_scale,
            )  # fmt: skip
            assert numbers["batch"] == row.extra["batch"]


def test_a_resume_continues_bit_for_bit(run: Path) -> None:
    before = fingerprint(torch.load(run / "step-12.pt", weights_only=False))
    train(run, steps=14, every=6, resume=run / "step-6.pt")
    first, second = rows(run), rows(run, attempt=2)
    assert sorted(second) == list(range(7, 15))
    for step, row in second.items():
        was = first[step]
        assert (row.loss, row.grad_norm, row.lr, row.extra["batch"]) == (
            was.loss,
            was.grad_norm,
            was.lr,
            was.extra["batch"],
        )
    # The checkpoint that it writes again is the same one, random generators and all.
    assert fingerprint(torch.load(run / "step-12.pt", weights_only=False)) == before
    seal = read_seal(LocalStore(run), "", "step-12.pt")
    assert seal is not None and seal.attempt == 2

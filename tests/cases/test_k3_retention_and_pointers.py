"""K3 and K4: rotation, pointers and links; shards that are not all in one place."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptguard.testing_cases import Case, age, at, each
from ckptguard.testing_damage import drop, edit_json, edit_weights, resave

Holds = Callable[[Case, Path], list[str]]


def losses(folder: Path, add: float) -> None:
    """Give a checkpoint the log of another run: other losses for the same steps."""

    def change(state: dict) -> None:
        for row in state["log_history"]:
            if "loss" in row:
                row["loss"] = float(row["loss"]) + add

    edit_json(folder / "trainer_state.json", change)


def foreign(run: Path) -> None:
    """A new run in the output folder of an old one, whose numbers are higher."""
    shutil.copyfile(run / "checkpoint-10/rng_state.pth", run / "foreign-rng.pth")
    for step in (10, 20):
        drop(run / f"checkpoint-{step}")
    (run / "checkpoint-30").rename(run / "old")
    shutil.copytree(run / "old", run / "checkpoint-500")
    shutil.copytree(run / "old", run / "checkpoint-30")
    drop(run / "old")
    old = run / "checkpoint-500"
    losses(old, 0.7)
    drop(old / "rng_state.pth")
    shutil.copyfile(run / "foreign-rng.pth", old / "rng_state.pth")
    drop(run / "foreign-rng.pth")
    edit_weights(old / "model.safetensors", lambda w: {n: t + 0.001 for n, t in w.items()})
    edit_json(old / "trainer_state.json", lambda s: s.update(global_step=500))
    for name, change in (("scheduler.pt", _scheduler_at), ("optimizer.pt", _optimizer_at)):
        resave(old / name, change)
    age(run, [old, run / "checkpoint-30"])


def _scheduler_at(state: dict) -> None:
    state.update(last_epoch=500, _step_count=501)


def _optimizer_at(state: dict) -> None:
    for values in state["state"].values():
        values["step"] = torch.tensor(500.0)


def older_run_of_a_loop(run: Path) -> None:
    """A loop's checkpoint of an older run with a higher number; the log is the new run's."""

    def change(state: dict) -> None:
        state["step"] = 500
        state["scheduler"].update(last_epoch=500, _step_count=501)
        for values in state["optimizer"]["state"].values():
            values["step"] = torch.tensor(500.0)

    shutil.copy(run / "ckpt_10.pt", run / "ckpt_500.pt")
    resave(run / "ckpt_500.pt", change)
    age(run, [run / "ckpt_500.pt", *(run / f"ckpt_{n}.pt" for n in (10, 20, 30))])


def reversed_times(run: Path) -> None:
    age(run, [run / f"checkpoint-{n}" for n in (30, 20, 10)])


def rotated(run: Path) -> None:
    for step in (10, 20):
        drop(run / f"checkpoint-{step}")


def best_and_last(run: Path) -> None:
    """Lightning since 2.1: last.ckpt is a link to the file that was saved last, which is the best one."""
    (run / "epoch=2-step=30.ckpt").unlink()
    os.symlink("epoch=1-step=20.ckpt", run / "last.ckpt")


def link(name: str, target: str) -> Callable[[Path], None]:
    return lambda run: os.symlink(target, run / name)


def several_last(run: Path) -> None:
    """Files of metrics in their names, of which the ones before were not removed; their order is not the steps'."""
    (run / "epoch=0-step=10.ckpt").rename(run / "a-epoch=6-last.ckpt")
    (run / "epoch=1-step=20.ckpt").rename(run / "a-epoch=13-last.ckpt")
    (run / "epoch=2-step=30.ckpt").unlink()


def best_path(name: str) -> Callable[[Path], None]:
    def change(state: dict) -> None:
        state["callbacks"] = {"ModelCheckpoint{'monitor': 'loss'}": {"best_model_path": f"/old/place/{name}", "best_model_score": torch.tensor(1.0), "last_model_path": ""}}  # fmt: skip

    return at("epoch=2-step=30.ckpt", resave, change)


def says(text: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / "latest").write_text(text)

    return make


LAST = "epoch=2-step=30.ckpt"

TRAINER = [
    Case("B34 times in the reverse of the steps", reversed_times, {}, "checkpoint-30"),
    Case("B35 the higher numbers are of an older run", foreign, {}, "checkpoint-30", run="foreign-checkpoint@checkpoint-500", safe="checkpoint-30"),
    Case("B36 only the newest is left [TRAP]", rotated, {}, "checkpoint-30"),
    Case("B36 the newest was rotated away", at("checkpoint-30", drop), {}, "checkpoint-20"),
]  # fmt: skip

LIGHTNING = [
    Case("B40 last is a link to the best [TRAP]", best_and_last, {}, "epoch=1-step=20.ckpt"),
    Case("a link to the newest", link("last.ckpt", LAST), {}, LAST),
    Case("B41 last links to itself", link("last.ckpt", "last.ckpt"), {}, LAST, run="dangling-pointer@last.ckpt"),
    Case("B41 a dangling link", link("last.ckpt", "epoch=9-step=90.ckpt"), {}, LAST, run="dangling-pointer@last.ckpt"),
    Case("B41 an absolute link into a folder that is gone", link("last.ckpt", "/old/run/epoch=2-step=30.ckpt"), {}, LAST, run="dangling-pointer@last.ckpt"),
    Case("last as a second save", lambda run: shutil.copy2(run / LAST, run / "last.ckpt"), {"last.ckpt": "exact"}, "last.ckpt|" + LAST),
    Case("B42 several of the name last", several_last, {}, "a-epoch=13-last.ckpt"),
    Case("B48 the best path of another rank", best_path("epoch=2-step=30-v0.ckpt"), {}, LAST),
    Case("B10 the best path in another place [TRAP]", best_path("epoch=1-step=20.ckpt"), {}, LAST),
]  # fmt: skip

PLAIN = [
    Case("B39 the highest number is of an older run", older_run_of_a_loop, {"ckpt_500.pt": "exact|lossy lr-mismatch? rng-mismatch? frozen-weights?"}, "ckpt_30.pt", run="foreign-checkpoint@ckpt_500.pt"),
    Case("the pointer ends with a newline [TRAP]", says("ckpt_30.pt\n"), {}, "ckpt_30.pt"),
    Case("the pointer has spaces [TRAP]", says(" ckpt_30.pt \n\n"), {}, "ckpt_30.pt"),
    Case("an absolute path in the pointer [TRAP]", says("/another/host/run/ckpt_30.pt"), {}, "ckpt_30.pt"),
    Case("an empty pointer", says(""), {}, "ckpt_30.pt", run="dangling-pointer"),
    Case("a pointer to nothing", says("ckpt_40.pt"), {}, "ckpt_30.pt", run="dangling-pointer"),
    Case("the pointer says a number [TRAP]", says("30"), {}, "ckpt_30.pt"),
    Case("a stale pointer", each(says("ckpt_20.pt"), lambda run: os.utime(run / "latest", (1.6e9, 1.6e9))), {}, "ckpt_30.pt", run="stale-pointer"),
    Case("a pointer of JSON [TRAP]", each(lambda run: (run / "latest").unlink(), lambda run: (run / "latest.json").write_text(json.dumps({"path": "ckpt_30.pt", "step": 30}))), {}, "ckpt_30.pt"),
]  # fmt: skip


@pytest.mark.parametrize("case", TRAINER, ids=str)
def test_trainer(case: Case, holds: Holds, trainer_run: Path) -> None:
    assert holds(case, trainer_run) == []


@pytest.mark.parametrize("case", LIGHTNING, ids=str)
def test_lightning(case: Case, holds: Holds, lightning_run: Path) -> None:
    assert holds(case, lightning_run) == []


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_loop(case: Case, holds: Holds, plain_run: Path) -> None:
    assert holds(case, plain_run) == []

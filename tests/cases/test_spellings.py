"""The same faults under other names: keys, file names and numbers of checkpoints as people's own loops have them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptguard.testing_cases import Case, age
from ckptguard.testing_damage import resave, truncate

Holds = Callable[[Case, Path], list[str]]
State = dict[str, Any]


def nanogpt(s: State) -> State:
    return {
        "model": {f"_orig_mod.{n}": t for n, t in s["model"].items()}, "optimizer": s["optimizer"],
        "model_args": {"n_layer": 3}, "iter_num": s["step"], "best_val_loss": torch.tensor(2.5), "config": {"dropout": 0.0},
    }  # fmt: skip


def tutorial(s: State) -> State:
    return {
        "epoch": s["step"],
        "model_state_dict": s["model"],
        "optimizer_state_dict": s["optimizer"],
        "loss": 0.25,
    }


def everything(s: State) -> State:
    return {
        "net": s["model"], "opt": s["optimizer"], "lr_scheduler": s["scheduler"], "global_step": s["step"], "epoch": 0,
        "np_random": s["rng"]["numpy"], "py_random": s["rng"]["python"], "torch_rng_state": s["rng"]["torch"], "cuda_rng_state_all": [],
        "args": {"lr": 1e-2, "seed": 1}, "scaler": {},
    }  # fmt: skip


def nested(s: State) -> State:
    return {
        "trainer": {"model": {f"module.{n}": t for n, t in s["model"].items()}, "optim": s["optimizer"], "sched": s["scheduler"]},
        "meta": {"step": s["step"]},
    }  # fmt: skip


def lists(s: State) -> State:
    return {"state_dict": s["model"], "optimizers": [s["optimizer"]], "schedulers": [s["scheduler"]], "iteration": s["step"], "metrics": {"loss": [1.0, 0.5]}}  # fmt: skip


def several(s: State) -> State:
    """A generator and a critic."""
    return {
        "generator": s["model"], "discriminator": {n: t * 0.5 for n, t in s["model"].items()},
        "optimizer_g": s["optimizer"], "optimizer_d": s["optimizer"], "steps": s["step"],
    }  # fmt: skip


def averaged(s: State) -> State:
    mean = {f"module.{n}": t * 0.9 for n, t in s["model"].items()}
    return {"model": s["model"], "optimizer": s["optimizer"], "swa_model": {"n_averaged": torch.tensor(s["step"]), **mean}, "step": s["step"]}  # fmt: skip


def ultralytics(s: State) -> State:
    return {
        "epoch": s["step"], "best_fitness": 0.1, "model": s["model"], "ema": {n: t * 0.9 for n, t in s["model"].items()}, "updates": s["step"],
        "optimizer": s["optimizer"], "train_args": {"lr0": 0.01}, "date": "2026-01-01", "version": "8.3",
    }  # fmt: skip


SPELLINGS = (nanogpt, tutorial, everything, nested, lists, several, averaged, ultralytics)
NAMES = (
    "model-{:06d}.pth",
    "epoch_{}.pt",
    "iter-{}.pth.tar",
    "step_{:08d}.ckpt",
    "run1.checkpoint.{}.pt",
    "{}.pt",
)
WELL = "exact|lossy"


def spelled(how: Callable[[State], State], name: str, keep: tuple[int, ...]) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        for path in (run / "latest", run / "metrics.jsonl"):
            path.unlink()
        for step in (10, 20, 30):
            state = torch.load(run / f"ckpt_{step}.pt", weights_only=False)
            (run / f"ckpt_{step}.pt").unlink()
            if step in keep:
                torch.save(how(state), run / name.format(step))
        age(run, [run / name.format(step) for step in keep])

    return make


def stale_optimizer(path: Path) -> None:
    older = torch.load(path.with_name(path.name.replace("30", "20")), weights_only=False)

    def change(state: State) -> None:
        for key, value in state.items():
            if isinstance(value, dict) and "param_groups" in value:
                state[key] = older[key]

    resave(path, change)


def not_a_number(path: Path) -> None:
    def change(state: Any) -> None:
        for value in state.values():
            if isinstance(value, dict):
                weight = next((t for n, t in value.items() if str(n).endswith("layers.1.up.weight")), None)
                if weight is not None:
                    weight[0, 0] = float("nan")
                    return
                change(value)

    resave(path, change)


@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize("keep", [(30,), (20, 30), (10, 20, 30)], ids=len)
def test_healthy(how: Callable[[State], State], keep: tuple[int, ...], holds: Holds, plain_run: Path) -> None:
    expect = {f"ckpt_{n}.pt": WELL for n in keep}
    assert holds(Case("", spelled(how, "ckpt_{}.pt", keep), expect, "ckpt_30.pt"), plain_run) == []


@pytest.mark.parametrize("name", NAMES)
def test_other_names(name: str, holds: Holds, plain_run: Path) -> None:
    keep = (10, 20, 30)
    expect = {name.format(n): WELL for n in keep}
    assert holds(Case("", spelled(everything, name, keep), expect, name.format(30)), plain_run) == []


@pytest.mark.parametrize("how", SPELLINGS)
def test_damaged(how: Callable[[State], State], holds: Holds, plain_run: Path) -> None:
    def make(run: Path) -> None:
        spelled(how, "ckpt_{}.pt", (10, 20, 30))(run)
        not_a_number(run / "ckpt_30.pt")
        truncate(run / "ckpt_10.pt", 0.5)

    expect = {"ckpt_10.pt": "unsafe truncated|bad-header", "ckpt_20.pt": WELL, "ckpt_30.pt": "unsafe nonfinite-weights@layers.1.up.weight"}  # fmt: skip
    assert holds(Case("", make, expect, "ckpt_20.pt"), plain_run) == []


@pytest.mark.parametrize("how", [s for s in SPELLINGS if s not in (nested, lists, tutorial, ultralytics)])
def test_stale_optimizer(how: Callable[[State], State], holds: Holds, plain_run: Path) -> None:
    def make(run: Path) -> None:
        spelled(how, "ckpt_{}.pt", (10, 20, 30))(run)
        stale_optimizer(run / "ckpt_30.pt")

    expect = {"ckpt_10.pt": WELL, "ckpt_20.pt": WELL, "ckpt_30.pt": "lossy step-mismatch lr-mismatch?"}
    assert holds(Case("", make, expect, "ckpt_20.pt", safe="ckpt_30.pt"), plain_run) == []


def in_folders(parts: dict[str, Callable[[State], Any]], name: str) -> Callable[[Path], None]:
    """A folder a save: a torch file a part, JSON for what ends so."""

    def make(run: Path) -> None:
        (run / "latest").unlink()
        folders = []
        for step in (10, 20, 30):
            state = torch.load(run / f"ckpt_{step}.pt", weights_only=False)
            (run / f"ckpt_{step}.pt").unlink()
            folder = run / name.format(step)
            folder.mkdir()
            folders.append(folder)
            for file, part in parts.items():
                if file.endswith(".json"):
                    (folder / file).write_text(json.dumps(part(state)))
                elif file.endswith(".safetensors"):
                    from safetensors.torch import save_file

                    save_file(part(state), folder / file)
                else:
                    torch.save(part(state), folder / file)
        age(run, folders)

    return make


SPECULATORS = {
    "model.safetensors": lambda s: s["model"],
    "optimizer_state_dict.pt": lambda s: s["optimizer"],
    "scheduler_state_dict.pt": lambda s: s["scheduler"],
    "training_state.json": lambda s: {"global_step": s["step"], "epoch": 0},
}
PARTS = {"model.pt": lambda s: s["model"], "optim.pt": lambda s: s["optimizer"], "sched.pt": lambda s: s["scheduler"], "rng.pt": lambda s: s["rng"]}  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "name"),
    [(SPECULATORS, "{}"), (SPECULATORS, "checkpoint_{:05d}"), (PARTS, "step_{}"), (PARTS, "ckpt-{}")],
    ids=["B05 numbers", "B05 names", "parts step", "parts ckpt"],
)
@pytest.mark.parametrize("fault", ["none", "model cut", "optimizer gone", "state gone"])
def test_folders(parts: dict[str, Any], name: str, fault: str, holds: Holds, plain_run: Path) -> None:
    names = list(parts)

    def make(run: Path) -> None:
        in_folders(parts, name)(run)
        newest = run / name.format(30)
        if fault == "model cut":
            truncate(newest / names[0], 0.6)
        elif fault == "optimizer gone":
            os.unlink(newest / names[1])
        elif fault == "state gone":
            os.unlink(newest / names[3])

    expect = {name.format(n): WELL for n in (10, 20, 30)}
    expect[name.format(30)] = {
        "none": WELL,
        "model cut": "unsafe truncated|bad-header|out-of-bounds",
        "optimizer gone": "lossy missing-optimizer",
        "state gone": "lossy missing-rng|missing-trainer-state missing-trainer-state?",
    }[fault]
    chosen, safe = (name.format(30),) * 2 if fault == "none" else (name.format(20), "")
    safe = name.format(30) if fault in ("optimizer gone", "state gone") else safe
    assert holds(Case("", make, expect, chosen, safe=safe), plain_run) == []

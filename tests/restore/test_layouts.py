"""Checkpoints that are laid out otherwise: distributed, in a directory, with classes of the user's own, on S3."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from ckptguard.errors import RecipeError

RECIPES = Path(__file__).parent / "recipes"


def recipes_in(name: str):
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(run: Path, save, steps: int = 18, every: int = 6, loop=None) -> Path:
    """The plain loop (or another) with another way to save."""
    run.mkdir(parents=True)
    loops = recipes_in("plain_loop")
    loop = loop or loops.Loop()
    parts = loop.build("cpu")
    with (run / "log.jsonl").open("w") as log:
        for step in range(1, steps + 1):
            numbers = loop.step(parts)
            numbers = {
                "loss": float(numbers["loss"].detach())
                if hasattr(numbers["loss"], "detach")
                else numbers["loss"]
            }
            log.write(json.dumps({"step": step, **numbers}) + "\n")
            if step % every == 0:
                save(run / f"step-{step}", parts, loops.state_of(parts, step))
    return run


@pytest.mark.dcp
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True], ids=["named", "flat"])
def test_a_distributed_checkpoint(here, recipe, tmp_path, flat):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def save(path, parts, state):
        model, optimizer = get_state_dict(parts["model"], parts["optimizer"], options=options)
        rest = {"rng": {"torch": torch.get_rng_state()}}
        dcp.save({**state, **rest, "model": model, "optimizer": optimizer}, checkpoint_id=str(path))

    run = train(tmp_path / "run", save)
    report = here(run / "step-6", recipe("plain_loop:Loop"))
    assert (report.result, report.bitwise) == ("continuous", True)
    assert report.against == "step-12" and report.compared > 150
    shard = next((run / "step-6").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-200])
    assert here(run / "step-6", recipe("plain_loop:Loop")).findings[0].code == "restore-failed"


def test_a_directory_of_files_named_by_their_component(here, recipe, tmp_path):
    def save(path, parts, state):
        path.mkdir()
        rng, step = state.pop("rng"), state.pop("step")
        for name, part in state.items():
            torch.save(part, path / f"{name}.pt")
        torch.save({**rng, "step": step}, path / "rng_state.pt")

    run = train(tmp_path / "run", save)
    report = here(run / "step-6", recipe("plain_loop:Loop"))
    assert (report.result, report.bitwise) == ("continuous", True)


def test_torchdatas_stateful_loader_goes_on_across_an_epoch(here, recipe, tmp_path):
    pytest.importorskip("torchdata")
    loop = recipes_in("stateful_loader").Loop()
    run = train(
        tmp_path / "run", lambda path, parts, state: torch.save(state, path.with_suffix(".pt")), loop=loop
    )
    report = here(run / "step-6.pt", recipe("stateful_loader:Loop"))
    assert (report.result, report.bitwise, report.against) == ("continuous", True, "step-12.pt")


@pytest.mark.hf
def test_what_accelerate_saves(here, recipe, tmp_path):
    loop = recipes_in("stateful_loader").Accelerated()
    run = train(tmp_path / "run", lambda path, parts, state: loop.accelerator.save_state(path), loop=loop)
    report = here(run / "step-6", recipe("stateful_loader:Accelerated"))
    assert (report.result, report.bitwise, report.layout) == ("continuous", True, "accelerate")


def test_wrapped_names_and_classes_of_the_users_own(here, recipe, tmp_path):
    def save(path, parts, state):
        model = {f"module.{name}": value for name, value in state.pop("model").items()}
        content = {**state, "model": model, "args": argparse.Namespace(lr=1)}
        torch.save(content, path.with_suffix(".pt"))

    run = train(tmp_path / "run", save)
    report = here(run / "step-6.pt", recipe("plain_loop:Loop"))
    assert (report.result, report.bitwise) == ("continuous", True)


class Canary:
    def __reduce__(self):
        return os.mkdir, ("canary-was-executed",)


def test_a_pickle_is_never_executed_by_the_default_load(
    here, recipe, logged_run, copy, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    run = copy(logged_run)
    state = torch.load(run / "ckpt_12.pt", weights_only=False)
    torch.save({**state, "extra": Canary()}, run / "ckpt_12.pt")
    report = here(run / "ckpt_12.pt", recipe("plain_loop:Loop"), steps=2)
    assert report.result == "continuous"
    assert not (tmp_path / "canary-was-executed").exists()


def test_a_layout_that_is_not_taken_apart_asks_for_a_load(here, recipe, tmp_path):
    tag = tmp_path / "run" / "global_step5"
    tag.mkdir(parents=True)
    torch.save({"module": {}}, tag / "mp_rank_00_model_states.pt")
    with pytest.raises(RecipeError, match="how a checkpoint of the layout deepspeed is loaded"):
        here(tag, recipe("plain_loop:Loop"))


@pytest.mark.s3
@pytest.mark.parametrize("kind", ["recorded", "logged"])
def test_a_checkpoint_on_s3_is_staged_and_nothing_is_left(
    here, recipe, request, s3_bucket, monkeypatch, tmp_path, kind
):
    from ckptguard.storage import open_store

    run = request.getfixturevalue(f"{kind}_run")
    store = open_store(s3_bucket)
    for path in sorted(p for p in run.rglob("*") if p.is_file()):
        store.put(f"runs/a/{path.relative_to(run).as_posix()}", path.read_bytes())
    stages = tmp_path / "stages"
    stages.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(stages))
    before = sorted((e.key, e.etag) for e in store.list())
    report = here(f"{s3_bucket}/runs/a/ckpt_12.pt", recipe("plain_loop:Loop"))
    assert (report.result, report.bitwise) == ("continuous", True)
    assert report.checks == (6 if kind == "recorded" else 3)
    assert sorted((e.key, e.etag) for e in store.list()) == before
    assert list(stages.iterdir()) == []

"""What the numbers in names count: epochs, iterations of several steps, saves. None of them is a contradiction."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptguard.inspect import Options, audit, preflight
from ckptguard.model import Resume


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", ["checkpoint-{}.pth.tar", "checkpoint{:04d}.pth", "epoch_{}.pt"])
def test_numbers_of_epochs(name: str, first: int, tmp_path: Path, plain: Any) -> None:
    """Image trainers store the epoch and nothing else, and name their files by it."""
    run, alone, loop = tmp_path / "run", tmp_path / "alone", plain.Loop()
    run.mkdir()
    alone.mkdir()
    for epoch, _ in enumerate(loop.steps(saves=3)):
        torch.save({"epoch": epoch, **loop.parts()}, run / name.format(epoch + first))
    assert [v.step for v in plain.quiet(run)] == [4, 8, 12]
    newest = run / name.format(2 + first)
    assert preflight(str(run), Options(grace=0.0)).resume_from == str(newest)
    shutil.copy(newest, alone)
    plain.quiet(alone, count=1)


def test_the_newest_is_told_by_content_where_names_do_not(tmp_path: Path, plain: Any) -> None:
    """`model_final.pth`, `last.pt` and a number of an epoch: audit and preflight choose the same file, whatever the times."""
    loop = plain.Loop()
    for epoch, step in enumerate(loop.steps()):
        names = {0: ["checkpoint0000.pth"], 1: ["checkpoint0001.pth", "model_best.pth"], 2: ["last.pth"]}
        for name in names[epoch]:
            torch.save({"epoch": epoch, **loop.parts()}, tmp_path / name)
            os.utime(tmp_path / name, (1.7e9 - step, 1.7e9 - step))
    (report,) = audit(str(tmp_path), Options(grace=0.0))
    assert report.resume_from == str(tmp_path / "last.pth")
    assert preflight(str(tmp_path), Options(grace=0.0)).resume_from == str(tmp_path / "last.pth")


def test_names_of_a_copied_tree_are_ordered_as_numbers(tmp_path: Path, plain: Any) -> None:
    loop = plain.Loop()
    for step in loop.steps():
        torch.save({"net": loop.model.state_dict()}, tmp_path / f"weights-of-run_{step}.pt")
        os.utime(tmp_path / f"weights-of-run_{step}.pt", (1.7e9, 1.7e9))
    (report,) = audit(str(tmp_path), Options(grace=0.0))
    assert report.newest_safe == str(tmp_path / "weights-of-run_12.pt")


def test_a_copy_is_not_preferred_to_its_original(tmp_path: Path, plain: Any) -> None:
    loop = plain.Loop()
    for step in loop.steps(saves=2):
        torch.save({"step": step, **loop.parts()}, tmp_path / f"ckpt_{step}.pt")
    for name in ("ckpt_8 (1).pt", "ckpt_8 - Copy.pt", "ckpt_8.bak.pt"):
        shutil.copyfile(tmp_path / "ckpt_8.pt", tmp_path / name)
    (report,) = audit(str(tmp_path), Options(grace=0.0))
    assert report.resume_from == str(tmp_path / "ckpt_8.pt")


@pytest.mark.parametrize("steps", [lambda i: 20 * (i + 1), lambda i: 10 * i + i % 2 + 3])
def test_iterations_of_several_optimizer_steps(steps: object, tmp_path: Path, plain: Any) -> None:
    """Reinforcement learning counts iterations, each of several steps, not always as many."""
    loop = plain.Loop(scheduler=lambda o: None)
    for iteration in (2, 5, 10, 15):
        for _ in loop.steps(saves=1, every=steps(iteration) - loop.step):  # type: ignore[operator]
            pass
        torch.save({"iter": iteration, **loop.parts()}, tmp_path / f"model_{iteration}.pt")
    plain.quiet(tmp_path, count=4)


def test_an_optimizer_of_another_iteration_is_still_seen(tmp_path: Path, plain: Any) -> None:
    loop = plain.Loop(scheduler=lambda o: None)
    kept = {}
    for iteration in (2, 5, 10, 15):
        for _ in loop.steps(saves=1, every=20 * (iteration + 1) - loop.step):
            pass
        kept[iteration] = {"iter": iteration, **loop.parts()}
        if iteration == 15:
            kept[15]["optimizer"] = kept[10]["optimizer"]
        torch.save(kept[iteration], tmp_path / f"model_{iteration}.pt")
        kept[iteration] = torch.load(tmp_path / f"model_{iteration}.pt", weights_only=False)
    (report,) = audit(str(tmp_path), Options(grace=0.0))
    newest = report.checkpoints[-1]
    assert (newest.resume, {f.code for f in newest.findings if f.loud}) == (Resume.LOSSY, {"step-mismatch"})


def test_micro_batches_beside_the_steps_of_the_name(tmp_path: Path, plain: Any) -> None:
    loop = plain.Loop()
    for step in loop.steps(saves=1):
        state = {"iter_num": 3 * step, "step_count": step, **loop.parts()}
        torch.save(state, tmp_path / f"step-{step:08d}.pt")
    assert [v.step for v in plain.quiet(tmp_path, count=1)] == [4]

"""Several networks, averages that begin late, files without an ending, folders whose files are called anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptguard.inspect import Options, audit
from ckptguard.model import Resume, RunReport

Parts = Callable[[Any, Any], dict[str, Any]]


def look(run: Path) -> RunReport:
    (report,) = audit(str(run), Options(grace=0.0))
    return report


def alarms(report: RunReport) -> dict[str, set[str]]:
    return {Path(v.path).name: {f.code for f in v.findings if f.loud} for v in report.checkpoints}


FOLDERS: dict[str, Parts] = {
    "net and misc": lambda g, d: {
        "net.pth": g.model.state_dict(),
        "optimizer.pth": g.optimizer.state_dict(),
        "misc.pth": {"it": g.step, "rng": g.parts()["rng"], "sched": g.parts()["scheduler"]},
    },
    "two networks": lambda g, d: {
        "G.pth": g.model.state_dict(),
        "D.pth": d.model.state_dict(),
        "optG.pth": g.optimizer.state_dict(),
        "optD.pth": d.optimizer.state_dict(),
        "scheduler_g.pth": g.parts()["scheduler"],
        "scheduler_d.pth": d.parts()["scheduler"],
        "state.pth": {"epoch": g.step // 4 - 1, "rng": g.parts()["rng"]},
    },
}


def in_folders(plain: Any, run: Path, parts: Parts, name: str) -> None:
    run.mkdir(parents=True, exist_ok=True)
    g, d = plain.Loop(), plain.Loop()
    for epoch, (step, _) in enumerate(zip(g.steps(), d.steps())):
        folder = run / name.format(step if "step" in name else epoch)
        folder.mkdir()
        for file, part in parts(g, d).items():
            torch.save(part, folder / file)


@pytest.mark.parametrize("name", ["step_{}", "epoch_{}"])
@pytest.mark.parametrize("parts", FOLDERS)
def test_folders_of_files_called_anything(parts: str, name: str, tmp_path: Path, plain: Any) -> None:
    in_folders(plain, tmp_path, FOLDERS[parts], name)
    plain.quiet(tmp_path)


def test_a_lost_network_and_a_stale_optimizer_are_seen(tmp_path: Path, plain: Any) -> None:
    in_folders(plain, tmp_path, FOLDERS["two networks"], "epoch_{}")
    (tmp_path / "epoch_2" / "D.pth").unlink()
    assert alarms(look(tmp_path))["epoch_2"] == {"missing-tensor"}
    shutil.copy(tmp_path / "epoch_1" / "D.pth", tmp_path / "epoch_2")
    shutil.copy(tmp_path / "epoch_1" / "optG.pth", tmp_path / "epoch_2")
    assert "step-mismatch" in alarms(look(tmp_path))["epoch_2"]


def test_notes_in_plain_text_beside_torch_files(tmp_path: Path, plain: Any) -> None:
    """SpeechBrain's recoverables all end in `.ckpt`, and some hold a number as text."""
    loop = plain.Loop()
    for step in loop.steps():
        folder = tmp_path / f"CKPT+2026-01-0{step // 4}+10-00-00+00"
        folder.mkdir()
        for name in ("model", "optimizer", "rng", "scheduler"):
            torch.save(loop.parts()[name], folder / f"{name}.ckpt")
        (folder / "counter.ckpt").write_text(str(step // 4))
        (folder / "dataloader-TRAIN.ckpt").write_text("40")
        (folder / "brain.ckpt").write_text(f"avg_train_loss: 2.0\noptimizer_step: {step}\n")
        (folder / "CKPT.yaml").write_text("WER: 10\n")
    plain.quiet(tmp_path)
    (tmp_path / "CKPT+2026-01-03+10-00-00+00" / "scheduler.ckpt").write_text("40")
    assert look(tmp_path).checkpoints[-1].resume is Resume.UNSAFE


def test_files_without_an_ending(tmp_path: Path, plain: Any) -> None:
    loop = plain.Loop()
    for step in loop.steps():
        torch.save({"iteration": step, **loop.parts()}, tmp_path / f"checkpoint_{step}")
        (tmp_path / f"state_{step}").write_bytes(b"no checkpoint at all")
    plain.quiet(tmp_path)
    newest = tmp_path / "checkpoint_12"
    newest.write_bytes(newest.read_bytes()[:9000])
    assert alarms(look(tmp_path)) == {
        "checkpoint_4": set(),
        "checkpoint_8": set(),
        "checkpoint_12": {"truncated"},
    }


def test_averages_by_the_same_step_in_a_file_of_their_own(tmp_path: Path, plain: Any) -> None:
    """Guided diffusion: `model000004.pt`, `ema_0.9999_000004.pt`, `opt000004.pt` are one checkpoint."""
    loop = plain.Loop()
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    average.update_parameters(loop.model)
    for step in loop.steps():
        average.update_parameters(loop.model)
        torch.save(loop.model.state_dict(), tmp_path / f"model{step:06d}.pt")
        torch.save(average.module.state_dict(), tmp_path / f"ema_0.9999_{step:06d}.pt")
        torch.save(loop.optimizer.state_dict(), tmp_path / f"opt{step:06d}.pt")
    found = plain.quiet(tmp_path, Resume.LOSSY)
    assert [(v.step, v.components.get("ema")) for v in found] == [(4, True), (8, True), (12, True)]


def averaged(plain: Any, run: Path, begin: int) -> None:
    loop, average = plain.Loop(), None
    for step in loop.steps(saves=4):
        if step >= begin:
            average = average or torch.optim.swa_utils.AveragedModel(loop.model)
            average.update_parameters(loop.model)
        state = {"step": step, "ema": average.module.state_dict() if average else None, **loop.parts()}
        torch.save(state, run / f"ckpt_{step}.pt")


def test_averaging_may_begin_late(tmp_path: Path, plain: Any) -> None:
    averaged(plain, tmp_path, begin=12)
    plain.quiet(tmp_path, count=4)


def test_averages_that_were_lost_or_filled_with_weights_are_seen(tmp_path: Path, plain: Any) -> None:
    averaged(plain, tmp_path, begin=4)
    for step, value in ((12, lambda s: s["model"]), (16, lambda s: None)):
        state = torch.load(tmp_path / f"ckpt_{step}.pt", weights_only=False)
        state["ema"] = value(state)
        torch.save(state, tmp_path / f"ckpt_{step}.pt")
    seen = alarms(look(tmp_path))
    assert seen["ckpt_12.pt"] == seen["ckpt_16.pt"] == {"ema-mismatch"}


def test_a_target_network_rests_between_its_copies(tmp_path: Path, plain: Any) -> None:
    loop, target = plain.Loop(), None
    for step in loop.steps():
        if step != 8:
            target = {k: v.clone() for k, v in loop.model.state_dict().items()}
        torch.save({"steps": step, "target_q": target, **loop.parts()}, tmp_path / f"dqn_{step}.pt")
    plain.quiet(tmp_path)

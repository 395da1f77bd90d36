"""What is listed as a checkpoint: each line of the contract's section of that name."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from ckptguard.errors import NothingRecognised
from ckptguard.inspect import Options, audit
from ckptguard.model import Resume, RunReport

torch = pytest.importorskip("torch")


def state(step: int, **more: Any) -> dict[str, Any]:
    """A whole training state, as a plain loop saves it."""
    torch.manual_seed(step)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    for _ in range(step):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "step": step,
        **more,
    }


def save(path: Path, step: int, *without: str, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({k: v for k, v in state(step, **more).items() if k not in without}, path)
    return path


def reports(target: Path, **options: Any) -> tuple[RunReport, ...]:
    return audit(str(target), Options(grace=options.pop("grace", 0.0), **options))


def listed(target: Path, **options: Any) -> dict[str, Resume]:
    """What the one run lists, by path below the target."""
    (report,) = reports(target, **options)
    return {os.path.relpath(v.path, target): v.resume for v in report.checkpoints}


def codes(report: RunReport) -> list[str]:
    return [f.code for f in report.findings]


def trainer_checkpoint(folder: Path, step: int, *without: str) -> Path:
    """A Trainer's checkpoint of one process, with the files that make it one."""
    from safetensors.torch import save_file

    whole = state(step)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(whole["model"], folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(whole["optimizer"], folder / "optimizer.pt")
    torch.save(whole["scheduler"], folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "trainer_state.json").write_text(
        json.dumps({"global_step": step, "max_steps": 100, "log_history": []})
    )
    for name in without:
        (folder / name).unlink()
    return folder


def age(path: Path, seconds: float) -> None:
    """Make a file or folder, and all in it, look as if written so long ago."""
    then = time.time() - seconds
    for each in (path, *(path.rglob("*") if path.is_dir() else ())):
        os.utime(each, (then, then))


# --- lone files ---------------------------------------------------------------------------------------


def test_data_files_are_no_checkpoints(tmp_path: Path) -> None:
    torch.save(torch.randn(100, 4), tmp_path / "data.pt")
    torch.save([{"input_ids": [1, 2]}], tmp_path / "train.bin")
    (tmp_path / "tokens.bin").write_bytes(os.urandom(4096))
    (tmp_path / "README.md").write_text("words")
    with tarfile.open(tmp_path / "shards.tar", "w") as tar:
        tar.add(tmp_path / "README.md", "README.md")
    (tmp_path / "broken.pt").write_bytes(os.urandom(1000))
    with pytest.raises(NothingRecognised):
        audit(str(tmp_path))


def test_a_lone_file_counts_by_what_it_holds(tmp_path: Path) -> None:
    save(tmp_path / "final.pt", 3)
    torch.save(torch.randn(100, 4), tmp_path / "features.pt")
    assert listed(tmp_path) == {"final.pt": Resume.EXACT}


def test_a_name_with_a_step_counts_though_it_is_broken(tmp_path: Path) -> None:
    (tmp_path / "ckpt_40.pt").write_bytes(os.urandom(1000))
    assert listed(tmp_path) == {"ckpt_40.pt": Resume.UNSAFE}


def test_a_broken_one_of_a_series_is_judged(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"model-{step}.pt", step)
    (tmp_path / "model-3.pt").write_bytes(b"")
    assert listed(tmp_path) == {
        "model-1.pt": Resume.EXACT,
        "model-2.pt": Resume.EXACT,
        "model-3.pt": Resume.UNSAFE,
    }


# --- runs and exports ---------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer_state", [True, False])
def test_a_run_with_its_final_export_is_a_run(tmp_path: Path, trainer_state: bool) -> None:
    for step in (5, 10):
        trainer_checkpoint(tmp_path / f"checkpoint-{step}", step)
    exported = (
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        *(() if trainer_state else ("trainer_state.json",)),
    )
    trainer_checkpoint(tmp_path, 10, *exported)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    assert set(listed(tmp_path)) == {"checkpoint-5", "checkpoint-10"}


def test_several_runs_give_one_report_each(tmp_path: Path) -> None:
    for run in ("a", "b"):
        for step in (1, 2):
            save(tmp_path / run / f"step-{step}.pt", step)
    found = reports(tmp_path)
    assert [Path(r.root).name for r in found] == ["a", "b"]
    assert [len(r.checkpoints) for r in found] == [2, 2]


def test_checkpoints_below_the_folder_with_the_log_are_one_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.9}\n')
    for step in (1, 2):
        save(tmp_path / "checkpoints" / f"step-{step}.pt", step)
    (report,) = reports(tmp_path)
    assert report.root == str(tmp_path)
    assert len(report.checkpoints) == 2


def test_nothing_of_ours_is_listed(tmp_path: Path) -> None:
    save(tmp_path / "step-1.pt", 1)
    save(tmp_path / ".ckptguard" / "quarantine" / "x" / "step-2.pt", 2)
    assert set(listed(tmp_path)) == {"step-1.pt"}


# --- files of one save --------------------------------------------------------------------------------


def test_files_of_one_save_are_one_checkpoint(tmp_path: Path) -> None:
    for step in (100, 200):
        whole = state(2)
        torch.save(whole["model"], tmp_path / f"model_{step:06d}.pt")
        torch.save(whole["optimizer"], tmp_path / f"optim_{step:06d}_rank0.pt")
        (tmp_path / f"meta_{step:06d}.json").write_text(json.dumps({"step": step}))
    assert set(listed(tmp_path)) == {"model_000100.pt", "model_000200.pt"}


def test_copies_and_links_are_no_duplicates(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}.pt", step)
    shutil.copy(tmp_path / "step-2.pt", tmp_path / "last.pt")
    (tmp_path / "latest.pt").symlink_to("step-2.pt")
    (report,) = reports(tmp_path)
    assert "duplicate-checkpoint" not in codes(report)
    assert "latest.pt" not in {Path(v.path).name for v in report.checkpoints}
    assert all(not f.loud for v in report.checkpoints for f in v.findings)


def test_averaged_copies_are_no_duplicates(tmp_path: Path) -> None:
    for step in (1, 2):
        whole = state(step)
        torch.save(whole, tmp_path / f"step-{step}.pt")
        torch.save(
            {"ema": {k: v * 0.99 for k, v in whole["model"].items()}, "step": step},
            tmp_path / f"ema-{step}.pt",
        )
    (report,) = reports(tmp_path)
    assert "duplicate-checkpoint" not in codes(report)


# --- unfinished and overtaken -------------------------------------------------------------------------


def test_a_newer_temporary_one_is_listed_and_an_overtaken_one_is_debris(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}.pt", step)
    temporary = save(tmp_path / "step-3.pt.tmp", 3)
    (report,) = reports(tmp_path)
    newest = report.checkpoints[-1]
    assert (Path(newest.path).name, newest.resume) == ("step-3.pt.tmp", Resume.UNSAFE)
    assert "incomplete-save" in [f.code for f in newest.findings]
    save(tmp_path / "step-3.pt", 3)
    age(temporary, 60)
    (report,) = reports(tmp_path)
    assert {Path(v.path).name for v in report.checkpoints} == {"step-1.pt", "step-2.pt", "step-3.pt"}
    assert "debris" in codes(report)


def test_the_newest_unfinished_directory_is_listed_and_an_older_one_is_debris(tmp_path: Path) -> None:
    for step in (5, 10):
        trainer_checkpoint(tmp_path / f"checkpoint-{step}", step)
    trainer_checkpoint(tmp_path / "checkpoint-15", 15, "trainer_state.json", "rng_state.pth")
    assert listed(tmp_path)["checkpoint-15"] is Resume.UNSAFE
    trainer_checkpoint(tmp_path / "checkpoint-20", 20)
    (report,) = reports(tmp_path)
    assert {Path(v.path).name for v in report.checkpoints} == {
        "checkpoint-5",
        "checkpoint-10",
        "checkpoint-20",
    }
    assert "debris" in codes(report)


def test_what_a_rotation_left_behind_is_debris(tmp_path: Path) -> None:
    trainer_checkpoint(tmp_path / "checkpoint-5", 5, "model.safetensors")
    for step in (10, 15):
        trainer_checkpoint(tmp_path / f"checkpoint-{step}", step)
    (report,) = reports(tmp_path)
    assert {Path(v.path).name for v in report.checkpoints} == {"checkpoint-10", "checkpoint-15"}
    assert "debris" in codes(report)


def test_a_save_that_is_going_on_is_no_fault(tmp_path: Path) -> None:
    for step in (5, 10):
        age(trainer_checkpoint(tmp_path / f"checkpoint-{step}", step), 7200)
    trainer_checkpoint(tmp_path / "checkpoint-15", 15, "trainer_state.json")
    assert listed(tmp_path, grace=900.0)["checkpoint-15"] is Resume.WRITING
    assert listed(tmp_path, grace=0.0)["checkpoint-15"] is Resume.UNSAFE


# --- siblings -----------------------------------------------------------------------------------------


def resume_and_loss(target: Path, name: str) -> tuple[Resume, dict[str, bool]]:
    """The verdict on one, and which components it misses: loudly or as information."""
    found = [v for r in reports(target) for v in r.checkpoints if Path(v.path).name == name]
    return found[0].resume, {f.code: f.loud for f in found[0].findings if f.code.startswith("missing-")}


def test_a_checkpoint_named_directly_is_judged_with_its_siblings(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}.pt", step)
    save(tmp_path / "step-3.pt", 3, "optimizer")
    (report,) = reports(tmp_path / "step-3.pt")
    assert [Path(v.path).name for v in report.checkpoints] == ["step-3.pt"]
    assert {f.code: f.loud for f in report.checkpoints[0].findings}["missing-optimizer"] is True


def test_what_all_lack_is_configuration(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}.pt", step, "scheduler", "rng")
    resume, missing = resume_and_loss(tmp_path, "step-3.pt")
    assert resume in (Resume.EXACT, Resume.LOSSY)
    assert not any(missing.values())


def test_what_one_lacks_was_lost(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}.pt", step)
    save(tmp_path / "step-3.pt", 3, "scheduler")
    assert resume_and_loss(tmp_path, "step-3.pt") == (Resume.LOSSY, {"missing-scheduler": True})


@pytest.mark.parametrize(
    ("without", "loud"),
    [
        (("optimizer.pt", "scheduler.pt", "rng_state.pth"), False),
        (("optimizer.pt",), True),
        (("scheduler.pt",), True),
    ],
)
def test_alone_only_what_one_switch_drops_is_configuration(
    tmp_path: Path, without: tuple[str, ...], loud: bool
) -> None:
    trainer_checkpoint(tmp_path / "checkpoint-5", 5, *without)
    resume, missing = resume_and_loss(tmp_path, "checkpoint-5")
    assert resume is Resume.LOSSY
    assert missing
    assert any(missing.values()) is loud


# --- while we look ------------------------------------------------------------------------------------


def test_one_that_is_gone_when_the_look_ends_is_dropped(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        trainer_checkpoint(tmp_path / f"checkpoint-{step}", step)

    def rotate(name: str, count: int) -> None:
        shutil.rmtree(tmp_path / "checkpoint-5", ignore_errors=True)

    (report,) = audit(str(tmp_path), Options(grace=0.0, jobs=1), rotate)
    assert {Path(v.path).name for v in report.checkpoints} == {"checkpoint-10", "checkpoint-15"}
    gone = [f for f in report.findings if "checkpoint-5" in f.message]
    assert gone
    assert not any(f.loud for f in report.findings)

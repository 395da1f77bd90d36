"""`ckptguard preflight`: the decision, its exit statuses, quarantine and undo."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest


def cut(path: Path) -> None:
    """Halve a file and leave its time as it was."""
    before = path.stat()
    os.truncate(path, before.st_size // 2)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def listing(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}


def test_resumes_from_the_newest(run, command):
    result = command("preflight", run)
    assert (result.exit_code, result.stdout) == (0, f"{run}/ckpt_30.pt\n")


def test_passes_over_what_is_unsafe_and_says_why(run, command):
    cut(run / "ckpt_30.pt")
    result = command("preflight", run)
    assert (result.exit_code, result.stdout) == (0, f"{run}/ckpt_20.pt\n")
    assert "ckpt_30.pt is unsafe: truncated" in result.stderr


def test_document_lists_what_was_not_looked_at(run, command):
    document = command("preflight", run, "--json").document
    assert document["decision"] == "resume"
    assert document["resume_from"] == f"{run}/ckpt_30.pt"
    seen = {c["step"]: (c["resume"], c["evidence"]) for c in document["checkpoints"]}
    assert seen == {10: ("unknown", "listing"), 20: ("unknown", "listing"), 30: ("exact", "content")}


def test_stops_when_none_is_left(run, command):
    for step in (10, 20, 30):
        cut(run / f"ckpt_{step}.pt")
    result = command("preflight", run)
    assert (result.exit_code, result.stdout) == (1, "")
    document = command("preflight", run, "--json").document
    assert (document["decision"], document["resume_from"]) == ("stop", None)


def test_a_newer_one_that_lost_more_is_passed_over_unless_allowed(run, command):
    import torch

    path = run / "ckpt_30.pt"
    state = torch.load(path, weights_only=False)
    del state["optimizer"]
    torch.save(state, path)
    assert command("preflight", run).stdout == f"{run}/ckpt_20.pt\n"
    assert command("preflight", run, "--allow-lossy").stdout == f"{run}/ckpt_30.pt\n"


@pytest.mark.parametrize(("options", "status"), [([], 3), (["--no-fresh"], 1)])
def test_a_fresh_run(tmp_path, command, options, status):
    result = command("preflight", tmp_path, *options)
    assert (result.exit_code, result.stdout) == (status, "")


def test_a_missing_run_is_no_fresh_run(tmp_path, command):
    assert command("preflight", tmp_path / "unmounted").exit_code == 2
    assert command("preflight", tmp_path / "unmounted", "--allow-missing").exit_code == 3


def test_a_run_that_had_checkpoints_is_no_fresh_run(run, command):
    assert command("seal", run / "ckpt_30.pt").exit_code == 0
    for step in (10, 20, 30):
        (run / f"ckpt_{step}.pt").unlink()
    assert command("preflight", run).exit_code == 1


def test_quarantine_moves_unsafe_ones_away_and_undo_brings_them_back(run, command):
    cut(run / "ckpt_30.pt")
    before = listing(run)
    result = command("preflight", run, "--quarantine")
    assert (result.exit_code, result.stdout) == (0, f"{run}/ckpt_20.pt\n")
    assert not (run / "ckpt_30.pt").exists()
    assert (run / "latest").read_text() == "ckpt_20.pt\n"
    assert command("audit", run, "--json").exit_code == 0
    assert command("preflight", run, "--undo").exit_code == 0
    assert listing(run) == before


def test_quarantine_refuses_what_was_changed_lately(run, command):
    cut(run / "ckpt_30.pt")
    os.utime(run / "ckpt_30.pt", (time.time(), time.time()))
    result = command("preflight", run, "--quarantine")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "may still be being written" in result.stderr
    assert (run / "ckpt_30.pt").exists()


def test_undo_overwrites_nothing(run, command):
    cut(run / "ckpt_30.pt")
    command("preflight", run, "--quarantine")
    (run / "ckpt_30.pt").write_bytes(b"saved anew")
    result = command("preflight", run, "--undo")
    assert result.exit_code == 1
    assert (run / "ckpt_30.pt").read_bytes() == b"saved anew"
    assert list((run / ".ckptguard" / "quarantine").rglob("ckpt_30.pt"))


def test_a_directory_checkpoint_moves_whole(tmp_path, command, trained):
    import torch

    for step in (10, 20):
        state = torch.load(trained / f"ckpt_{step}.pt", weights_only=False)
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        torch.save(state["model"], folder / "model.pt")
        torch.save(state["optimizer"], folder / "optimizer.pt")
        (folder / "training_state.json").write_text(f'{{"step": {step}}}')
    cut(tmp_path / "checkpoint-20" / "model.pt")
    for path in tmp_path.rglob("*"):
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    before = listing(tmp_path)
    result = command("preflight", tmp_path, "--quarantine", "--allow-lossy")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/checkpoint-10\n")
    assert not (tmp_path / "checkpoint-20").exists()
    assert command("preflight", tmp_path, "--undo").exit_code == 0
    assert listing(tmp_path) == before


def test_nothing_beside_what_was_named_is_chosen_in_its_place(run, command):
    named = command("preflight", run / "ckpt_10.pt")
    assert (named.exit_code, named.stdout) == (0, f"{run}/ckpt_10.pt\n")
    cut(run / "ckpt_10.pt")
    refused = command("preflight", run / "ckpt_10.pt")
    assert (refused.exit_code, refused.stdout) == (1, "")
    (run / "train.py").write_text("print()\n")
    result = command("preflight", run / "train.py", "--json")
    assert result.exit_code == 2
    assert result.document["error"]["code"] == "nothing-recognised"


def test_of_several_runs_it_says_that_it_answers_for_one(run, command):
    import shutil

    other = Path(shutil.copytree(run, run.parent / "older"))
    (other / "ckpt_30.pt").unlink()
    result = command("preflight", run.parent)
    assert (result.exit_code, result.stdout) == (0, f"{run}/ckpt_30.pt\n")
    assert "2 runs lie under" in result.stderr


def test_undo_has_a_document_too(run, command):
    document = command("preflight", run, "--undo", "--json").document
    assert document == {"schema": 1, "target": str(run), "undone": []}

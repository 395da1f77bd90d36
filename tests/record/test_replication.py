"""Replication after a save: by the real command, in a process of its own, with its state on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ckptguard.record import Recorder


def state(run: Path, checkpoint: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / f".ckptguard/replication/{checkpoint}.json").read_text())
    return document


def test_each_checkpoint_is_copied_and_proven(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    copy.mkdir()
    with Recorder(run, replicate=str(copy)) as recorder:
        with recorder.save(run / "step-1.pt", 1):
            torch.save({"model": {"w": torch.ones(3)}, "step": 1}, run / "step-1.pt")
        recorder.flush()
        assert state(run, "step-1.pt")["state"] in ("queued", "uploading", "verified")
    found = state(run, "step-1.pt")
    assert (found["state"], found["destination"]) == ("verified", str(copy))
    assert (copy / "step-1.pt").read_bytes() == (run / "step-1.pt").read_bytes()


def test_a_copy_that_fails_is_said_to_have_failed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    in_the_way = tmp_path / "file"
    in_the_way.write_text("no folder")
    with Recorder(run, replicate=str(in_the_way / "copy")) as recorder:
        torch.save({"model": {"w": torch.ones(3)}}, run / "step-1.pt")
        recorder.saved(run / "step-1.pt", 1)
    assert recorder.aside is None
    found = state(run, "step-1.pt")
    assert found["state"] == "failed" and found["exit_status"] == 2 and found["message"]

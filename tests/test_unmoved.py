"""Weights that are still those of the checkpoint before: preflight sees them without reading that one whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptguard.inspect import Options, audit, preflight
from ckptguard.storage.local import LocalStore

WIDE = 512


def train(run: Path, save) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, WIDE), torch.nn.GELU(), torch.nn.Linear(WIDE, WIDE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.mkdir(parents=True)
    for step in range(1, 7):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            save(run, step, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})


def one_file(run: Path, step: int, state: dict) -> None:
    torch.save(state, run / f"step-{step}.pt")


def sharded(run: Path, step: int, state: dict) -> None:
    dcp.save(state, checkpoint_id=run / f"step-{step}", no_dist=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("files") / "run"
    train(run, one_file)
    return run


def with_old_weights(files: Path, to: Path, names: list[str] | None = None) -> Path:
    """A copy whose newest checkpoint holds weights of the one before."""
    run = Path(shutil.copytree(files, to / "run"))
    old, new = (torch.load(run / f"step-{step}.pt") for step in (4, 6))
    for name in names or list(new["model"]):
        new["model"][name] = old["model"][name]
    torch.save(new, run / "step-6.pt")
    return run


def test_a_training_whose_weights_move_is_resumed(files: Path) -> None:
    decision = preflight(str(files))
    assert decision.resume_from == f"{files}/step-6.pt" and not decision.reasons


def test_weights_that_did_not_move_are_passed_over(files: Path, tmp_path: Path) -> None:
    run = with_old_weights(files, tmp_path)
    decision = preflight(str(run))
    assert decision.resume_from == f"{run}/step-4.pt"
    (reason,) = decision.reasons
    assert "frozen-weights" in reason and "all 4 weights are those of" in reason


def test_a_weight_at_rest_among_moving_ones_is_left_to_the_audit(files: Path, tmp_path: Path) -> None:
    run = with_old_weights(files, tmp_path, ["2.weight"])
    assert preflight(str(run)).resume_from == f"{run}/step-6.pt"
    (report,) = audit(str(run), Options(grace=0.0))
    assert "frozen-weights" in {f.code for f in report.checkpoints[-1].findings}


def test_a_dead_optimizer_in_a_distributed_checkpoint(files: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 4, 6):
        state = torch.load(files / f"step-{step}.pt")
        state["model"] = torch.load(files / f"step-{min(step, 4)}.pt")["model"]
        sharded(run, step, state)
    decision = preflight(str(run))
    assert decision.resume_from == f"{run}/step-4"
    assert "frozen-weights" in decision.reasons[0]


def test_of_the_one_before_little_is_read(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = dict.fromkeys(("step-4.pt", "step-6.pt"), 0)
    inner = LocalStore.readinto

    def counted(self: LocalStore, key: str, start: int, buffer: memoryview) -> None:
        if key in read:
            read[key] += len(buffer)
        inner(self, key, start, buffer)

    monkeypatch.setattr(LocalStore, "readinto", counted)
    preflight(str(files))
    # Its structure, and the first window of one weight.
    assert read["step-4.pt"] < (files / "step-4.pt").stat().st_size / 20

"""A small run of plain torch files, made by a real training, and a way to call commands as a user does."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ckpt_10.pt, ckpt_20.pt, ckpt_30.pt, a pointer `latest` and metrics.jsonl."""
    import torch
    from torch import nn

    run = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(32, 16), nn.Dropout(0.1), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    with (run / "metrics.jsonl").open("w") as log:
        for step in range(1, 31):
            tokens = torch.randint(0, 32, (4, 8))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), ((tokens * 5 + 1) % 32).flatten())
            loss.backward()
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            log.write(json.dumps({"step": step, "loss": loss.item(), "lr": rate}) + "\n")
            if step % 10 == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "rng": {"torch": torch.get_rng_state()},
                    "step": step,
                }
                torch.save(state, run / f"ckpt_{step}.pt")
    (run / "latest").write_text("ckpt_30.pt\n")
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run whose files are an hour old, as those of a training that ended."""
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    settle(copy)
    return copy


def settle(run: Path, age: float = 3600.0) -> None:
    then = time.time() - age
    for path in run.rglob("*"):
        os.utime(path, (then, then))


@pytest.fixture
def command() -> Callable[..., Any]:
    """Runs a command line in this process: `.exit_code`, `.stdout`, `.stderr`, `.document` (of --json)."""
    from ckptguard.cli import build_app

    runner = CliRunner()

    def call(*arguments: object) -> Any:
        result = runner.invoke(build_app(), [str(a) for a in arguments])
        document = (
            json.loads(result.stdout)
            if "--json" in arguments and result.stdout.startswith(("{", "["))
            else None
        )
        return SimpleNamespace(
            exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr, document=document
        )

    return call

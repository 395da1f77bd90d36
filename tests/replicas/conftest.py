"""A small run in the layout of the Hugging Face Trainer, its files written by torch and safetensors themselves."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

STEPS = (10, 20, 30)


@pytest.fixture(scope="session")
def run_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints, 10, 20 and 30, of one training."""
    root = tmp_path_factory.mktemp("template") / "run"
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    history: list[dict[str, Any]] = []
    for step in range(1, STEPS[-1] + 1):
        loss = model(torch.randn(16, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        history.append({"step": step, "loss": loss.item(), "learning_rate": rate, "epoch": step / 100})
        if step in STEPS:
            folder = root / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            save_file(
                {k: v.contiguous() for k, v in model.state_dict().items()},
                folder / "model.safetensors",
                {"format": "pt"},
            )
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
            torch.save(scheduler.state_dict(), folder / "scheduler.pt")
            rng = {
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "cpu": torch.random.get_rng_state(),
            }
            torch.save(rng, folder / "rng_state.pth")
            state = {"global_step": step, "epoch": step / 100, "max_steps": 100, "log_history": list(history)}
            (folder / "trainer_state.json").write_text(json.dumps(state))
            (folder / "config.json").write_text("{}")
    return root


@pytest.fixture
def make_run(run_template: Path, tmp_path: Path) -> Callable[[], Path]:
    """A fresh copy of the run, an hour old."""
    import os
    import shutil
    import time

    def make() -> Path:
        root = tmp_path / "run"
        shutil.copytree(run_template, root)
        for path in root.rglob("*"):
            os.utime(path, (time.time() - 3600, time.time() - 3600))
        return root

    return make


@pytest.fixture
def ckptguard() -> Callable[..., Any]:
    """Runs a command of ckptguard in this process; returns what click's runner saw."""
    from typer.testing import CliRunner

    from ckptguard.cli import build_app

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(build_app(), [str(a) for a in arguments])

    return run

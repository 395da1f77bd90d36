"""Runs in front of which the gate is put: a small torch training's files, made fresh for each test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

CKPTGUARD = Path(sys.executable).with_name("ckptguard")
SCHEDULERS = ("SLURM", "TORCHELASTIC", "PMIX", "OMPI", "JOB_", "JOBSET", "CKPTGUARD")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def plain_environment() -> dict[str, str]:
    """The environment without what a scheduler of the machine that runs the tests may have put there."""
    return {k: v for k, v in os.environ.items() if not k.startswith(SCHEDULERS) and k not in RANKS}


@pytest.fixture
def ckptguard() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command as a user would: arguments, and what the environment has on top."""

    def call(
        *arguments: str | Path, environment: Mapping[str, str] | None = None, **options: object
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(CKPTGUARD), *map(str, arguments)],
            env={**plain_environment(), **(environment or {})},
            capture_output=True,
            text=True,
            timeout=120,
            **options,  # type: ignore[call-overload]
        )

    return call


def save(folder: Path, steps: Sequence[int]) -> None:
    """Checkpoints `step-N.pt` of one training, each with model, optimizer, scheduler and RNG."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    folder.mkdir(parents=True, exist_ok=True)
    for step in range(1, max(steps) + 1):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if step in steps:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "rng": torch.get_rng_state(),
                "step": step,
            }
            torch.save(state, folder / f"step-{step}.pt")


@pytest.fixture(scope="session")
def _healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy") / "run"
    save(folder, (10, 20, 30))
    return folder


@pytest.fixture
def healthy_run(_healthy: Path, tmp_path: Path) -> Path:
    """A copy of a run with step-10.pt, step-20.pt and step-30.pt, all good."""
    import shutil

    return Path(shutil.copytree(_healthy, tmp_path / "run"))


def flip(path: Path) -> None:
    """Change one bit in the middle of a file's first record of numbers."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.fixture
def broken_newest(healthy_run: Path) -> Path:
    """The same run, its newest checkpoint cut in half."""
    newest = healthy_run / "step-30.pt"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    return healthy_run

"""A small training that the tests of the recorder share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


class Training:
    """A few layers with dropout and batch norm on noise; every kind of state that a checkpoint has."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 20)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
        self.loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

    def step(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss, norm

    def state(self) -> dict[str, Any]:
        states = {name: part.state_dict() for name, part in self.parts.items()}
        rng = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
        return {**states, "rng": rng}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine several threads wait for each other at every operation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def training(one_thread: None) -> Training:
    return Training()

"""One tiny plain loop and one tiny Trainer run; most cases are copies of them, damaged or rearranged."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptguard.testing_cases import Case, age, contradictions

VOCABULARY, LENGTH, WIDTH = 32, 12, 16


@pytest.fixture
def holds(tmp_path: Path) -> Callable[[Case, Path], list[str]]:
    """`holds(case, run)`: what contradicts the case in a copy of the run."""

    def check(case: Case, run: Path) -> list[str]:
        return contradictions(case, Path(shutil.copytree(run, tmp_path / "run", symlinks=True)))

    return check


# --- the plain loop -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ckpt_10.pt, ckpt_20.pt, ckpt_30.pt, `latest` and a metric log, as a loop by hand writes them."""
    run = tmp_path_factory.mktemp("plain") / "run"
    run.mkdir()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 5) * (1 - s / 60))
    with (run / "metrics.jsonl").open("w") as log:
        for step in range(1, 31):
            ids = torch.randint(VOCABULARY, (4, LENGTH))
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            optimizer.zero_grad()
            loss.backward()
            rate = scheduler.get_last_lr()[0]
            optimizer.step()
            scheduler.step()
            log.write(json.dumps({"step": step, "loss": loss.item(), "lr": rate}) + "\n")
            if step % 10 == 0:
                torch.save(state_of(model, optimizer, scheduler, step), run / f"ckpt_{step}.pt")
    (run / "latest").write_text("ckpt_30.pt\n")
    age(run, [run / f"ckpt_{n}.pt" for n in (10, 20, 30)])
    return run


def state_of(model: nn.Module, optimizer: Any, scheduler: Any, step: int) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        },
        "step": step,
        "epoch": 0,
    }


# --- the Trainer --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def trainer_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint-10, checkpoint-20, checkpoint-30 of a tiny GPT-2, saved by the real Trainer."""
    transformers = pytest.importorskip("transformers")
    run = tmp_path_factory.mktemp("trainer") / "run"
    transformers.set_seed(1)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=3, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    rows = [torch.randint(VOCABULARY, (LENGTH,)) for _ in range(64)]
    arguments = transformers.TrainingArguments(
        output_dir=str(run), max_steps=30, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        save_steps=10, report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    age(run, [run / f"checkpoint-{n}" for n in (10, 20, 30)])
    return run


# --- what else saves a state --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def accelerate_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoints/checkpoint_0, _1, _2 of ten steps each, saved by accelerate."""
    accelerate = pytest.importorskip("accelerate")
    run = tmp_path_factory.mktemp("accelerate") / "run"
    accelerate.utils.set_seed(1)
    project = accelerate.utils.ProjectConfiguration(str(run), automatic_checkpoint_naming=True)
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 - s / 60)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for step in range(1, 31):
        ids = torch.randint(VOCABULARY, (4, LENGTH))
        accelerator.backward(nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.save_state()
    age(run, [run / f"checkpoints/checkpoint_{n}" for n in range(3)])
    return run


@pytest.fixture(scope="session")
def dcp_run(tmp_path_factory: pytest.TempPathFactory, plain_run: Path) -> Path:
    """step-10, step-20, step-30: the plain loop's states, saved by torch.distributed.checkpoint."""
    from torch.distributed import checkpoint

    run = tmp_path_factory.mktemp("dcp") / "run"
    for step in (10, 20, 30):
        held = torch.load(plain_run / f"ckpt_{step}.pt", weights_only=False)
        names = list(held["model"])
        state = {names[i]: values for i, values in held["optimizer"]["state"].items()}
        groups = [{**g, "params": names} for g in held["optimizer"]["param_groups"]]
        whole = {
            "model": held["model"],
            "optimizer": {"state": state, "param_groups": groups},
            "scheduler": held["scheduler"],
            "rng": held["rng"],
            "step": step,
        }
        checkpoint.save(whole, checkpoint_id=run / f"step-{step}", no_dist=True)
    age(run, [run / f"step-{n}" for n in (10, 20, 30)])
    return run


@pytest.fixture(scope="session")
def lightning_run(tmp_path_factory: pytest.TempPathFactory, plain_run: Path) -> Path:
    """epoch=0-step=10.ckpt ... epoch=2-step=30.ckpt: the plain loop's states in the form that Lightning saves."""
    run = tmp_path_factory.mktemp("lightning") / "run"
    run.mkdir()
    for epoch, step in enumerate((10, 20, 30)):
        torch.save(as_lightning(plain_run, epoch, step), run / f"epoch={epoch}-step={step}.ckpt")
    age(run, [run / f"epoch={e}-step={s}.ckpt" for e, s in enumerate((10, 20, 30))])
    return run


def as_lightning(plain_run: Path, epoch: int, step: int) -> dict[str, Any]:
    held = torch.load(plain_run / f"ckpt_{step}.pt", weights_only=False)
    made = {"total": {"ready": step, "completed": step}, "current": {"ready": 10, "completed": 10}}
    batches = {
        "total": {"ready": step, "started": step, "processed": step, "completed": step},
        "current": {"ready": 10, "started": 10, "processed": 10, "completed": 10},
        "is_last_batch": True,
    }
    epochs = {"ready": epoch + 1, "started": epoch + 1, "processed": epoch + 1, "completed": epoch}
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": batches,
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": made, "zero_grad": made}},
        "epoch_progress": {"total": epochs, "current": epochs},
    }
    return {
        "epoch": epoch,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": held["model"],
        "loops": {"fit_loop": fit},
        "callbacks": {},
        "optimizer_states": [held["optimizer"]],
        "lr_schedulers": [held["scheduler"]],
    }

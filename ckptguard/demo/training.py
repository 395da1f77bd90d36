"""The training of the demo: an ordinary PyTorch loop, with the Recorder in it.

python -m ckptguard.demo.training RUN [--steps 248] [--every 40] [--resume RUN/step-80.pt]
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptguard.demo.data import TextLoader, read_text
from ckptguard.demo.model import CONTEXT, ByteTransformer
from ckptguard.record import Recorder

BATCH = 16
STEPS = 248
"""Not a multiple of EVERY: what is logged after the newest checkpoint is what its restore is compared with."""
EVERY = 40
WARMUP = 20
RATE = 2e-3
CLIP = 1.0
SEED = 7
DEFINITIONS = {
    "loss": "mean per byte of the batch",
    "grad_norm": "global, before clipping",
    "clip": CLIP,
    "accumulation": 1,
    "precision": "fp32",
    "lr": "used by the step",
}


def build(device: str = "cpu", steps: int = STEPS) -> dict[str, Any]:
    """Everything that the training's state lies in, as it is before the first step."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    model = ByteTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)

    def rate(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))

    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        "scaler": torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=50),
        "dataloader": TextLoader(read_text(), context=CONTEXT, batch=BATCH, seed=SEED),
    }


def train_step(parts: dict[str, Any], batch: torch.Tensor) -> dict[str, Any]:
    """One optimizer step on a batch; its numbers. The scheduler is stepped too."""
    model, optimizer, scaler = parts["model"], parts["optimizer"], parts["scaler"]
    model.train()
    rate, scale = optimizer.param_groups[0]["lr"], scaler.get_scale()
    loss = model(batch.to(next(model.parameters()).device))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    parts["scheduler"].step()
    return {"loss": loss.detach(), "grad_norm": norm, "lr": rate, "loss_scale": scale}


def probe_loss(parts: dict[str, Any]) -> torch.Tensor:
    """The loss on one fixed batch."""
    batch = TextLoader(read_text(), context=CONTEXT, batch=BATCH, seed=SEED + 1).next()
    loss: torch.Tensor = parts["model"](batch.to(next(parts["model"].parameters()).device))
    return loss.detach()


def state_of(parts: dict[str, Any], step: int) -> dict[str, Any]:
    """What one checkpoint holds: all of it, or the training cannot be continued as if nothing had happened."""
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    states = {name: part.state_dict() for name, part in parts.items()}
    return {"step": step, "epoch": parts["dataloader"].epoch, **states, "rng": rng}


def load_state(parts: dict[str, Any], checkpoint: Path) -> int:
    """Bring a checkpoint of ours back; the step that it was written after."""
    state = torch.load(checkpoint, weights_only=False)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    random.setstate(state["rng"]["python"])
    np.random.set_state(state["rng"]["numpy"])
    torch.set_rng_state(state["rng"]["torch"])
    return int(state["step"])


def train(run: Path, *, steps: int = STEPS, every: int = EVERY, resume: Path | None = None) -> Recorder:
    """Train to a step, writing a checkpoint RUN/step-N.pt every few; what the recorder says of its own cost."""
    # On a busy machine two threads wait for each other at every operation: minutes instead of seconds.
    torch.set_num_threads(1)
    run.mkdir(parents=True, exist_ok=True)
    parts = build(steps=steps)
    step = load_state(parts, resume) if resume else 0
    with Recorder(run, parts, definitions=DEFINITIONS, probe=lambda: probe_loss(parts)) as recorder:
        if resume:
            recorder.resumed(step, resume)
        for batch in recorder.watch(parts["dataloader"]):
            step += 1
            recorder.step(step, **train_step(parts, batch))
            if step % every == 0:
                checkpoint = run / f"step-{step}.pt"
                with recorder.save(checkpoint, step):
                    torch.save(state_of(parts, step), checkpoint)
            if step >= steps:
                break
    return recorder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--resume", type=Path)
    arguments = parser.parse_args()
    train(arguments.run, steps=arguments.steps, every=arguments.every, resume=arguments.resume)


if __name__ == "__main__":
    main()

"""A small training loop as people write them, and the recipe that restores it: the tests' subject.

`python plain_loop.py RUN [--steps N] [--resume FILE]` trains; `Loop` is the recipe.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

VOCAB, LENGTH, BATCH, HORIZON = 16, 8, 4, 40
torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens[:, :-1])
        logits = self.head(hidden + self.body(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Loader:
    """A shuffled, stateful loader over a fixed Markov chain, so that there is something to learn."""

    def __init__(self) -> None:
        maker = torch.Generator().manual_seed(5)
        nearly = torch.eye(VOCAB).roll(1, 1) * 8 + 0.5
        tokens = [torch.zeros(64, dtype=torch.long)]
        for _ in range(LENGTH - 1):
            tokens.append(torch.multinomial(nearly[tokens[-1]], 1, generator=maker).flatten())
        self.data = torch.stack(tokens, 1)
        self.generator = torch.Generator().manual_seed(11)
        self.order: list[int] = []

    def next(self) -> torch.Tensor:
        if len(self.order) < BATCH:
            self.order = torch.randperm(len(self.data), generator=self.generator).tolist()
        taken, self.order = self.order[:BATCH], self.order[BATCH:]
        return self.data[taken]

    def state_dict(self) -> dict:
        return {"order": list(self.order), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.order = list(state["order"])
        self.generator.set_state(state["generator"])


class Loop:
    """The recipe: everything that one optimizer step needs, made anew."""

    def build(self, device: str) -> dict:
        torch.manual_seed(1)
        model = Model().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, HORIZON),
            "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7),
            "dataloader": Loader(),
        }

    def step(self, parts: dict) -> dict:
        model, optimizer, scaler = parts["model"], parts["optimizer"], parts["scaler"]
        model.train()
        batch = parts["dataloader"].next()
        scale, lr = scaler.get_scale(), optimizer.param_groups[0]["lr"]
        loss = model(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        parts["scheduler"].step()
        return {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr, "loss_scale": scale, "batch": batch}

    def probe(self, parts: dict) -> float:
        return parts["model"](Loader().data[:8]).item()


class OnRecordedBatches(Loop):
    """The same where the data is not there: steps on the batches that the recorder kept."""

    step = None  # type: ignore[assignment]

    def build(self, device: str) -> dict:
        parts = super().build(device)
        del parts["dataloader"]
        return parts

    def step_on(self, parts: dict, batches: list) -> dict:
        class Kept:
            def next(self) -> torch.Tensor:
                return batches[0]

        return Loop.step(self, {**parts, "dataloader": Kept()})


class OtherRate(Loop):
    """A recipe that is not this training: every step has another rate."""

    def build(self, device: str) -> dict:
        parts = super().build(device)
        parts["scheduler"] = torch.optim.lr_scheduler.LambdaLR(parts["optimizer"], lambda step: 0.5)
        return parts

    def load(self, parts: dict, checkpoint: str) -> None:
        state = torch.load(checkpoint, weights_only=False)
        for name in ("model", "optimizer", "scaler", "dataloader"):
            parts[name].load_state_dict(state[name])


class WiderModel(Loop):
    def build(self, device: str) -> dict:
        parts = super().build(device)
        parts["model"].body = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 16))
        return parts


class ForgetsMoments(Loop):
    """Resume code with a fault: it keeps the optimizer's groups and drops its moments."""

    def load(self, parts: dict, checkpoint: str) -> None:
        state = torch.load(checkpoint, weights_only=False)
        state["optimizer"]["state"] = {}
        for name, part in parts.items():
            part.load_state_dict(state[name])


class Half(Loop):
    """Resume code with a fault: the weights go through bfloat16."""

    def load(self, parts: dict, checkpoint: str) -> None:
        state = torch.load(checkpoint, weights_only=False)
        state["model"] = {name: value.bfloat16() for name, value in state["model"].items()}
        for name, part in parts.items():
            part.load_state_dict(state[name])


class Noisy(Loop):
    """A device that does not repeat: each process adds its own rounding to the weights before a step."""

    def step(self, parts: dict) -> dict:
        own = torch.Generator().manual_seed(time.time_ns() % 2**31)
        with torch.no_grad():
            for weight in parts["model"].parameters():
                weight *= 1 + 1e-6 * torch.randn(weight.shape, generator=own)
        return super().step(parts)


class Raises(Loop):
    def step(self, parts: dict) -> dict:
        raise KeyError("tokens")


class Hangs(Loop):
    def step(self, parts: dict) -> dict:
        while True:
            time.sleep(0.1)


class EatsMemory(Loop):
    def step(self, parts: dict) -> dict:
        held = []
        while True:
            held.append(bytearray(b"x" * (50 << 20)))
            time.sleep(0.01)


def state_of(parts: dict, step: int) -> dict:
    state = {name: part.state_dict() for name, part in parts.items()}
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return {**state, "rng": rng, "step": step}


def train(
    run: Path, steps: int, every: int, log: str = "metrics.jsonl", resume: str | None = None, slow: float = 0
) -> None:
    random.seed(3)
    np.random.seed(3)
    parts = Loop().build("cpu")
    start = 0
    if resume:
        state = torch.load(resume, weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        random.setstate(state["rng"]["python"])
        np.random.set_state(state["rng"]["numpy"])
        torch.set_rng_state(state["rng"]["torch"])
        start = state["step"]
    run.mkdir(parents=True, exist_ok=True)
    with (run / log).open("a") as file:
        for step in range(start + 1, steps + 1):
            numbers = Loop.step(Loop(), parts)
            del numbers["batch"]
            file.write(json.dumps({"step": step, **numbers}) + "\n")
            file.flush()
            if step % every == 0:
                torch.save(state_of(parts, step), run / f"ckpt_{step}.pt")
            time.sleep(slow)


def record(run: Path, steps: int, every: int) -> None:
    """The same training under the Recorder."""
    from ckptguard.record import Recorder

    parts = Loop().build("cpu")
    loop = Loop()
    recorder = Recorder(run, parts, probe=lambda: loop.probe(parts), background=False)
    for step in range(1, steps + 1):
        numbers = loop.step(parts)
        recorder.consumed(numbers.pop("batch"), 0.0)
        recorder.step(step, **numbers)
        if step % every == 0:
            with recorder.save(run / f"ckpt_{step}.pt", step):
                torch.save(state_of(parts, step), run / f"ckpt_{step}.pt")
    recorder.close()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("run", type=Path)
    arguments.add_argument("--steps", type=int, default=HORIZON)
    arguments.add_argument("--every", type=int, default=100)
    arguments.add_argument("--resume")
    arguments.add_argument("--slow", type=float, default=0)
    given = arguments.parse_args()
    train(given.run, given.steps, given.every, resume=given.resume, slow=given.slow)

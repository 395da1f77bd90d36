"""Recipes as a newcomer may write them: with parts of their own names, parts left out, and faults. Neighbour of plain_loop."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from plain_loop import Loop, state_of


class TwoOptimizers(Loop):
    """Matrices by momentum, vectors by Adam; the rates are constant."""

    def build(self, device: str) -> dict:
        parts = super().build(device)
        weights = list(parts["model"].parameters())
        del parts["scheduler"], parts["scaler"]
        parts["optimizer"] = torch.optim.SGD([w for w in weights if w.ndim > 1], lr=1e-1, momentum=0.9)
        parts["opt_vectors"] = torch.optim.AdamW([w for w in weights if w.ndim < 2], lr=1e-3)
        return parts

    def step(self, parts: dict) -> dict:
        loss = parts["model"](parts["dataloader"].next())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parts["model"].parameters(), 1.0)
        for optimizer in (parts["optimizer"], parts["opt_vectors"]):
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.item(), "grad_norm": norm.item(), "lr": 1e-1}


class LeavesOneOut(TwoOptimizers):
    """One of the optimizers is no part: it is not restored."""

    def build(self, device: str) -> dict:
        parts = super().build(device)
        self.left_out = parts.pop("opt_vectors")
        return parts

    def step(self, parts: dict) -> dict:
        return super().step({**parts, "opt_vectors": self.left_out})


def train_two(run: Path, steps: int, every: int) -> None:
    """Nothing says in which environment this was logged."""
    run.mkdir(parents=True)
    loop = TwoOptimizers()
    parts = loop.build("cpu")
    with (run / "metrics.jsonl").open("w") as log:
        for step in range(1, steps + 1):
            log.write(json.dumps({"step": step, **loop.step(parts)}) + "\n")
            if step % every == 0:
                torch.save(state_of(parts, step), run / f"ckpt_{step}.pt")


NAMES = {"net": "model", "adam": "optimizer", "rate": "scheduler", "amp": "scaler", "text": "dataloader"}


class OwnNames(Loop):
    """Sound: it loads what it needs itself, under other names than the file's."""

    FORGETS = ""

    def build(self, device: str) -> dict:
        parts = super().build(device)
        return {own: parts[name] for own, name in NAMES.items()}

    def load(self, parts: dict, checkpoint: str) -> None:
        state = torch.load(checkpoint, weights_only=False)
        for own, name in NAMES.items():
            if own != self.FORGETS:
                parts[own].load_state_dict(state[name])

    def step(self, parts: dict) -> dict:
        return super().step({name: parts[own] for own, name in NAMES.items()})

    def probe(self, parts: dict) -> float:
        return super().probe({"model": parts["net"]})


class OwnNamesForgets(OwnNames):
    FORGETS = "adam"


class Casts(Loop):
    """Its load() casts the weights, and the steps fail for that."""

    def load(self, parts: dict, checkpoint: str) -> None:
        state = torch.load(checkpoint, weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        parts["model"].double()

    def step(self, parts: dict) -> dict:
        raise RuntimeError("expected scalar type Float but found Double")

    probe = None  # type: ignore[assignment]


class Mistyped(Loop):
    def load(self, parts: dict, checkpoint: str) -> None:
        torch.lode(checkpoint)


class NeedsAll(Loop):
    """Its load() is right, and asks for everything that a sound checkpoint holds."""

    def load(self, parts: dict, checkpoint: str) -> None:
        state = torch.load(checkpoint, weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(state[name])


class Vanishes(Loop):
    def step(self, parts: dict) -> dict:
        os._exit(0)


class StepOfText(Loop):
    def step(self, parts: dict) -> dict:
        return {**super().step(parts), "step": "next"}


class ProbeOfNothing(Loop):
    def probe(self, parts: dict) -> None:  # type: ignore[override]
        return None


class ProbeOfText(Loop):
    def probe(self, parts: dict) -> str:  # type: ignore[override]
        return "low"


class OpaqueBatch(Loop):
    """Its batches are objects that nothing can be read of."""

    def step(self, parts: dict) -> dict:
        return {**super().step(parts), "batch": object()}

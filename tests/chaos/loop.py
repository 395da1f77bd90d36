"""A training loop as people write it: saves in place, resumes from what it is told. Bit for bit reproducible on the CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--resume", type=Path)
given = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
step = 0
if given.resume is not None:
    state = torch.load(given.resume, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    step = state["step"]
print(f"resumed from step {step}", flush=True)
given.out.mkdir(parents=True, exist_ok=True)
while step < 12:
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    step += 1
    if step % 4 == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "step": step,
        }
        torch.save(state, given.out / f"step-{step}.pt")
torch.save(model.state_dict(), given.out / "final.pt")

"""What the Recorder costs: its own time per step, and a save with and without it. Ratios within one run.

python benchmarks/recorder.py [--steps 400] [--megabytes 300] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ckptguard.record import Recorder

LIMIT_STEP = 0.5e-3
REPEATS = 5


def parts_of(megabytes: int) -> dict[str, Any]:
    """A model and an AdamW with all its state, of about so many megabytes together."""
    width = int((megabytes * 1e6 / 12 / 4) ** 0.5)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return {"model": model, "optimizer": optimizer, "scaler": scaler}


def own_time(folder: Path, steps: int, **options: Any) -> dict[str, float]:
    """Seconds per step that the recorder accounts to itself, on batches of 8 x 2048 tokens."""
    loss, norm = torch.tensor(2.5), torch.tensor(1.0)
    batch = {
        "input_ids": torch.randint(0, 50_000, (8, 2048)),
        "attention_mask": torch.ones(8, 2048, dtype=torch.int64),
    }
    with Recorder(folder, parts_of(1), **options) as recorder:
        for step in range(1, steps + 1):
            recorder.consumed(batch)
            recorder.step(step, loss=loss, grad_norm=norm, tokens=16384)
            if step == 10:
                recorder.saved(folder / "none.pt", step)
    return {"mean": recorder.overhead.mean, "worst": recorder.overhead.worst}


def save_time(folder: Path, megabytes: int) -> dict[str, float]:
    """Median seconds for which a save holds the training up: bare, recorded, and with the files hashed before going on."""
    parts = parts_of(megabytes)
    state = {name: part.state_dict() for name, part in parts.items()}
    path = folder / "checkpoint.pt"
    bare, recorded, whole = [], [], []
    with Recorder(folder, parts) as later, Recorder(folder / "at-once", parts, background=False) as at_once:
        inside = folder / "at-once" / "checkpoint.pt"
        for step in range(REPEATS):
            began = time.perf_counter()
            torch.save(state, path)
            bare.append(time.perf_counter() - began)
            began = time.perf_counter()
            with later.save(path, step):
                torch.save(state, path)
            recorded.append(time.perf_counter() - began)
            later.flush()
            began = time.perf_counter()
            with at_once.save(inside, step):
                torch.save(state, inside)
            whole.append(time.perf_counter() - began)
    size = path.stat().st_size
    return {
        "bytes": size,
        "bare": statistics.median(bare),
        "recorded": statistics.median(recorded),
        "recorded_and_hashed": statistics.median(whole),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plain = own_time(folder / "plain", arguments.steps, batches=0)
        full = own_time(folder / "full", arguments.steps)
        save = save_time(folder / "save", arguments.megabytes)
    result = {"step": plain, "step_with_fixed_batches": full, "save": save, "limit_step": LIMIT_STEP}
    good = plain["mean"] <= LIMIT_STEP
    if arguments.json:
        print(json.dumps({**result, "good": good}))
        return 0 if good else 1
    print(
        f"recorder, own time per step   {plain['mean'] * 1e3:8.3f} ms mean, {plain['worst'] * 1e3:.3f} ms worst (limit 0.5 ms mean)"
    )
    print(
        f"  with fixed batches kept     {full['mean'] * 1e3:8.3f} ms mean, {full['worst'] * 1e3:.3f} ms worst"
    )
    print(f"save of {save['bytes'] / 1e6:.0f} MB, bare          {save['bare']:8.3f} s")
    for name, label in (("recorded", "recorded"), ("recorded_and_hashed", "files hashed at once")):
        print(f"  {label:<27} {save[name]:8.3f} s = {save[name] / save['bare']:.2f} of bare")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())

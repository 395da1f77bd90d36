"""What a structure audit of a run costs as its checkpoints grow in number: the time should grow in proportion.

python benchmarks/runs.py [--checkpoints 1000] [--folder DIR]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from ckptguard.inspect import Options, audit
from ckptguard.model import Evidence, Resume


def make(folder: Path, count: int) -> Path:
    """A run of so many saves of a small model with its optimizer, ten steps apart."""
    run = folder / f"run-{count}"
    run.mkdir()
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(10, 10 * count + 1, 10):
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        for entry in state["state"].values():
            entry["step"] = torch.tensor(float(step))
        torch.save(
            {"model": model.state_dict(), "optimizer": state, "step": step, "rng": torch.get_rng_state()},
            run / f"step_{step}.pt",
        )
    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    first = 0.0
    try:
        for count in (options.checkpoints // 4, options.checkpoints // 2, options.checkpoints):
            run = make(folder, count)
            begin = time.perf_counter()
            report = audit(str(run), Options(depth=Evidence.STRUCTURE, grace=0))[0]
            seconds = time.perf_counter() - begin
            assert {v.resume for v in report.checkpoints} == {Resume.EXACT}
            each = seconds / count
            first = first or each
            print(
                f"{count:6} checkpoints  {seconds:7.2f} s  {each * 1e3:6.2f} ms each  {each / first:5.2f} x the smallest run's"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

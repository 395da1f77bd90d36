"""What an audit of DCP checkpoints costs: many tensors at structure, many bytes at content.

python benchmarks/dcp.py [--gigabytes 2] [--tensors 10000] [--shards 256] [--folder DIR] [--json]

Structure: seconds for three sizes, which should grow with the number of entries. Content: against reading the same bytes,
against `dcp.load`, and against SHA-256 on one thread, as Megatron's own integrity check does it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from ckptguard.inspect import Options, audit
from ckptguard.model import Evidence, Resume

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def many(folder: Path, tensors: int, shards: int) -> Path:
    """A training state of so many small tensors: weights, two moments and a step for each parameter."""
    model, state = {}, {}
    for i in range(tensors // 4):
        name = f"layers.{i // 8}.block.{i % 8}.weight"
        model[name] = torch.full((16, 16), 0.5 + i)
        state[name] = {
            "step": torch.tensor(7.0),
            "exp_avg": model[name] * 0.1,
            "exp_avg_sq": model[name] * 0.01,
        }
    groups = [{"lr": 1e-3, "params": list(model)}]
    writer = dcp.FileSystemWriter(folder / "save_7", thread_count=shards, sync_files=False)
    dcp.save(
        {"model": model, "optimizer": {"state": state, "param_groups": groups}, "step": 7},
        storage_writer=writer,
        no_dist=True,
    )
    return folder


def large(folder: Path, gigabytes: float) -> tuple[Path, dict[str, Any]]:
    """So many bytes in tensors of 32 MB, weights in bfloat16 and moments in float32, in four shards."""
    generator = torch.Generator().manual_seed(1)
    count = max(1, int(gigabytes * 1e9 / (10 * (1 << 22))))
    model, state = {}, {}
    for i in range(count):
        weight = torch.randn(2048, 2048, generator=generator)
        model[f"layers.{i}.weight"] = weight.bfloat16()
        state[f"layers.{i}.weight"] = {
            "step": torch.tensor(7.0),
            "exp_avg": weight * 0.1,
            "exp_avg_sq": weight.square(),
        }
    held = {
        "model": model,
        "optimizer": {"state": state, "param_groups": [{"lr": 1e-3, "params": list(model)}]},
        "step": 7,
    }
    dcp.save(
        held,
        storage_writer=dcp.FileSystemWriter(folder / "save_7", thread_count=4, sync_files=False),
        no_dist=True,
    )
    return folder, held


def looked_at(folder: Path, depth: Evidence) -> None:
    (report,) = audit(str(folder), Options(depth=depth, grace=0.0))
    (verdict,) = report.checkpoints
    assert verdict.resume in (Resume.EXACT, Resume.LOSSY), [f.message for f in verdict.findings]


def read_all(folder: Path) -> None:
    buffer = bytearray(8 << 20)
    for path in sorted((folder / "save_7").iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def sha256_all(folder: Path) -> None:
    for path in sorted((folder / "save_7").iterdir()):
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")


def seconds(run: Callable[[], object], repeats: int = 2) -> float:
    """The best of some runs, files in the page cache."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def structure(folder: Path, tensors: int, shards: int) -> dict[str, float]:
    found = {}
    for size in (tensors // 4, tensors // 2, tensors):
        run = many(folder / f"many-{size}", size, min(shards, size))
        found[str(size)] = seconds(partial(looked_at, run, Evidence.STRUCTURE))
    return found


def content(folder: Path, gigabytes: float) -> dict[str, float]:
    run, held = large(folder / "large", gigabytes)
    size = sum(p.stat().st_size for p in (run / "save_7").iterdir())
    loaded = seconds(lambda: dcp.load(held, checkpoint_id=run / "save_7", no_dist=True), 1)
    held.clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read_all(run)
    result = {
        "gigabytes": size / 1e9,
        "audit": seconds(lambda: looked_at(run, Evidence.CONTENT)),
        "reading": seconds(lambda: read_all(run)),
        "dcp.load": loaded,
        "sha256, one thread": seconds(lambda: sha256_all(run), 1),
    }
    result["more memory, MB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--shards", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        result: dict[str, Any] = {
            "cores": len(os.sched_getaffinity(0)),
            "structure": structure(Path(scratch), options.tensors, options.shards),
            "content": content(Path(scratch), options.gigabytes),
        }
    if options.json:
        print(json.dumps(result))
        return
    print(f"structure, {options.shards} shards, seconds by number of tensors:")
    for size, took in result["structure"].items():
        print(f"  {size:>7} {took:8.2f}   {took / int(size) * 1e6:6.0f} µs a tensor")
    found = result["content"]
    print(f"content of {found.pop('gigabytes'):.2f} GB, {result['cores']} cores:")
    more = found.pop("more memory, MB")
    for name, took in found.items():
        print(f"  {name:20} {took:8.2f} s")
    print(f"  memory beyond what was held before: {more:.0f} MB")


if __name__ == "__main__":
    main()

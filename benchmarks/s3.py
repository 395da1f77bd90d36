"""Speed of audits and copies on S3, as ratios to what moves the same bytes and proves nothing; one server, one run.

    python benchmarks/s3.py             1 GB; a few minutes
    python benchmarks/s3.py --quick     128 MB; under a minute

Prints one JSON document. Server, client and comparison share the cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

BUCKET = "s3://bench"
RANGES = (8, 64)  # MiB: what clients ask for at once, and what an audit does
BUFFER = 1 << 20
READERS = 4
REPEATS = 3
ROUNDS = 6


def best(act: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Seconds of the quickest of several runs."""
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        act()
        found.append(time.perf_counter() - begin)
    return min(found)


def bare_download(url: str, key: str, length: int) -> int:
    """The fastest that this client can bring an object here: ranges of this length in parallel, thrown away as they come."""
    from ckptguard.storage.s3 import S3Store

    store = S3Store(url)
    size = store.stat(key).size
    local = threading.local()

    def fetch(start: int) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(BUFFER))
        end = min(size, start + length)
        with store.stream(key, start, end) as fill:
            for at in range(start, end, BUFFER):
                fill(local.buffer[: end - at])
        return end - start

    with ThreadPoolExecutor(READERS) as pool:
        return sum(pool.map(fetch, range(0, size, length)))


def audit_of(url: str, depth: str = "content") -> None:
    from ckptguard.inspect import Options, audit
    from ckptguard.model import Evidence

    reports = audit(url, Options(depth=Evidence(depth), grace=0))
    assert all(v.resume.safe for r in reports for v in r.checkpoints), reports


def write_checkpoint(folder: Path, size: int) -> Path:
    """One torch file of about this size, as a training loop saves it."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    count = max(1, size // (3 << 24))
    model = {f"layer.{n}": torch.randn(1 << 22) * 0.02 for n in range(count)}
    moments = {
        n: {
            "step": torch.tensor(10.0),
            "exp_avg": torch.randn(1 << 22) * 1e-3,
            "exp_avg_sq": torch.rand(1 << 22) * 1e-6,
        }
        for n in range(count)
    }
    group = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "params": list(range(count)),
    }
    path = folder / "ckpt_10.pt"
    torch.save({"model": model, "optimizer": {"state": moments, "param_groups": [group]}, "step": 10}, path)
    return path


def command(*arguments: object) -> None:
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{arguments[0]}: {done.stderr}")


def s5cmd(*arguments: object) -> None:
    endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
    command(Path(sys.executable).parent / "s5cmd", "--endpoint-url", endpoint, *arguments)


def measure_audit(folder: Path, size: int) -> dict[str, Any]:
    """Content audit on S3 against the bare download, and against a download by s5cmd with a local audit after it."""
    path = write_checkpoint(folder / "run", size)
    command(
        sys.executable,
        "-m",
        "ckptguard",
        "replicate",
        path,
        f"{BUCKET}/run",
        "--quiet",
        "--depth",
        "structure",
    )
    length = path.stat().st_size

    acts: dict[str, Callable[[], Any]] = {
        f"bare_{mib}_mib": partial(bare_download, f"{BUCKET}/run", "ckpt_10.pt", mib << 20) for mib in RANGES
    }
    acts["audit"] = lambda: audit_of(f"{BUCKET}/run")
    # In turn, so that what else the machine does meets all of them.
    rounds = [{name: best(act, 1) for name, act in acts.items()} for _ in range(ROUNDS)]
    seconds = {name: min(times[name] for times in rounds) for name in acts}

    def download_and_audit() -> None:
        there = folder / "download"
        there.mkdir()
        s5cmd("cp", f"{BUCKET}/run/ckpt_10.pt", f"{there}/")
        audit_of(str(there))
        shutil.rmtree(there)

    other = best(download_and_audit)
    return {
        "bytes": length,
        **{f"{name}_mb_s": round(length / taken / 1e6) for name, taken in seconds.items()},
        "s5cmd_then_local_audit_mb_s": round(length / other / 1e6),
        **{
            f"ratio_to_{name}": round(taken / seconds["audit"], 2)
            for name, taken in seconds.items()
            if name != "audit"
        },
        "ratio_to_s5cmd": round(other / seconds["audit"], 2),
    }


def measure_replicate(folder: Path) -> dict[str, Any]:
    """Replicate against s5cmd and against the uploader of `aws s3 cp` (s3transfer), which prove nothing afterwards."""
    import boto3

    from ckptguard.replica_look import list_tree
    from ckptguard.replicate import replicate
    from ckptguard.storage import open_store

    source = list_tree(open_store(str(folder / "run")))
    (manifest,) = source.checkpoints
    length, number = manifest.size, iter(range(99))

    def ours() -> None:
        replicate(source.store, manifest, open_store(f"{BUCKET}/ours-{next(number)}"), now=time.time())  # type: ignore[arg-type]

    def transfer() -> None:
        boto3.client("s3").upload_file(str(folder / "run/ckpt_10.pt"), "bench", f"aws-{next(number)}")

    def five() -> None:
        s5cmd("cp", folder / "run/ckpt_10.pt", f"{BUCKET}/five-{next(number)}")

    times = {"replicate": best(ours, 2), "aws_s3_cp": best(transfer, 2), "s5cmd": best(five, 2)}
    return {
        **{f"{name}_mb_s": round(length / seconds / 1e6) for name, seconds in times.items()},
        "ratio_to_aws": round(times["aws_s3_cp"] / times["replicate"], 2),
        "ratio_to_s5cmd": round(times["s5cmd"] / times["replicate"], 2),
    }


def measure_many(checkpoints: int, files: int) -> dict[str, Any]:
    """Listing and structure audit of a run of many objects."""
    import numpy as np
    from safetensors.numpy import save

    from ckptguard.storage import open_store
    from ckptguard.storage.s3 import S3Store

    store = S3Store(f"{BUCKET}/many")
    shard = save({"w": np.ones(16, np.float32)})
    names = [f"model-{n:05}-of-{files - 1:05}.safetensors" for n in range(1, files)]
    shards = {name: save({f"w.{n}": np.ones(16, np.float32)}) for n, name in enumerate(names)}
    index = {
        "metadata": {"total_size": 64 * len(names)},
        "weight_map": {f"w.{n}": name for n, name in enumerate(names)},
    }
    objects = [
        (f"checkpoint-{step}/{name}", data)
        for step in range(1, checkpoints + 1)
        for name, data in {**shards, "model.safetensors.index.json": json.dumps(index).encode()}.items()
    ]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda item: store.put(*item), objects))
    begin = time.perf_counter()
    listed = sum(1 for _ in open_store(f"{BUCKET}/many").list())
    listing = time.perf_counter() - begin
    begin = time.perf_counter()
    command_json(["audit", f"{BUCKET}/many", "--depth", "structure", "--grace", "0s"])
    structure = time.perf_counter() - begin
    return {
        "objects": listed,
        "listing_s": round(listing, 2),
        "structure_audit_s": round(structure, 2),
        "objects_per_s": round(listed / structure),
        "one_shard_bytes": len(shard),
    }


def command_json(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptguard", *arguments, "--json"], capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr


def measure_memory(folder: Path, sizes: list[int]) -> dict[str, Any]:
    """Peak resident memory of a content audit and of replicate, by size."""
    found: dict[str, Any] = {}
    for size in sizes:
        path = write_checkpoint(folder / f"memory-{size}", size)
        s5cmd("cp", path, f"{BUCKET}/memory-{size}/ckpt_10.pt")
        label = f"{size / 1e9:.2g} GB"
        found[f"audit {label}"] = peak(["audit", f"{BUCKET}/memory-{size}", "--grace", "0s", "--quiet"])
        found[f"replicate {label}"] = peak(
            ["replicate", str(path), f"{BUCKET}/memory-copy-{size}", "--quiet", "--depth", "structure"]
        )
        shutil.rmtree(path.parent)
        s5cmd("rm", f"{BUCKET}/memory-{size}/*")
        s5cmd("rm", f"{BUCKET}/memory-copy-{size}/*")
    return found


def peak(arguments: list[str]) -> str:
    """In a child of a child, so that each peak is its own."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'ckptguard', *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return f"{int(done.stdout.split()[-1]) / 1024:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    from ckptguard.testing_s3 import SeaweedServer

    size = 128 * 10**6 if quick else 10**9
    with tempfile.TemporaryDirectory() as name, SeaweedServer(Path(name) / "server") as server:
        os.environ.update(server.environment())
        server.client().create_bucket(Bucket="bench")
        folder = Path(name)
        memory = [size] if quick else [size, 2 * size, 4 * size]
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "audit": lambda: measure_audit(folder, size),
            "replicate": lambda: measure_replicate(folder),
            "many_objects": lambda: measure_many(5 if quick else 100, 20 if quick else 100),
            "peak_memory": lambda: measure_memory(folder, memory),
        }
        results: dict[str, Any] = {"benchmark": "s3"}
        for part, measure in parts.items():
            results[part] = measure()
            print(part, json.dumps(results[part]), file=sys.stderr, flush=True)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

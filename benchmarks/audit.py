"""How fast an audit reads, against what else reads the same file: `make bench`.

Everything is measured in one run on the same cores with the file in the page cache, and shown as ratios, which mean the
same on any machine. Bare reading is a loop of readinto into one buffer a thread, of the size that the audit reads at once:
measured, the quickest size there is.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK = 4 << 20
SEGMENT = 32 << 20
CORES = len(os.sched_getaffinity(0))


def write_checkpoint(path: Path, gigabytes: float, dtype: str = "bfloat16") -> None:
    """Weights in bf16 and Adam's moments in fp32, in layers of a usual size."""
    import torch

    torch.manual_seed(0)
    total = int(gigabytes * (1 << 30))
    layer = torch.randn(1 << 21, dtype=torch.float32)
    state: dict[str, object] = {
        "model": {},
        "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3, "params": []}]},
        "step": 100,
    }
    used, i = 0, 0
    while used < total:
        weight = layer.to(getattr(torch, dtype)) * (1 + i / 100)
        moments = {"step": torch.tensor(100.0), "exp_avg": layer * 0.01, "exp_avg_sq": layer.square() * 1e-4}
        state["model"][f"layers.{i}.weight"] = weight.reshape(1024, -1)  # type: ignore[index]
        state["optimizer"]["state"][i] = {k: v.reshape(1024, -1) if v.ndim else v for k, v in moments.items()}  # type: ignore[index]
        state["optimizer"]["param_groups"][0]["params"].append(i)  # type: ignore[index]
        used += weight.nbytes + 2 * layer.nbytes
        i += 1
    torch.save(state, path)


def bare(path: Path, threads: int) -> None:
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY)
    local = threading.local()

    def segment(begin: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(BLOCK))
        for at in range(begin, min(begin + SEGMENT, size), BLOCK):
            os.preadv(fd, [local.buffer[: min(BLOCK, size - at)]], at)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(segment, range(0, size, SEGMENT)))
    os.close(fd)


def hash_and_crc(path: Path, threads: int) -> None:
    """The pass with digests and checksums only: every tensor's values are taken for opaque."""
    from dataclasses import replace

    from ckptguard import facts, scan
    from ckptguard.formats import parse
    from ckptguard.storage.local import LocalStore

    store = LocalStore(path.parent)
    plan = facts.plan_scan(parse(store, path.name, path.stat().st_size, "torch"), path.stat().st_size, 0)
    plan = replace(plan, extents=tuple(replace(e, dtype="opaque") for e in plan.extents))
    joiner = scan.Joiner(plan)

    def segment(cut: tuple[int, int]) -> scan.Part:
        with store.stream(path.name, *cut) as fill:
            return scan.scan_segment(fill, plan, *cut)

    with ThreadPoolExecutor(threads) as pool:
        for part in pool.map(segment, plan.segments()):
            joiner.add(part)
    joiner.done()


def audited(path: Path, threads: int) -> None:
    from ckptguard.inspect import Options, audit

    (report,) = audit(str(path), Options(jobs=threads, grace=0.0))
    assert report.checkpoints[0].coverage.bytes_proven > 0.99 * path.stat().st_size, report


def sha256(path: Path, threads: int) -> None:
    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256")


def command(*words: str) -> Callable[[Path, int], None]:
    return lambda path, _: subprocess.run([*words, str(path)], check=True, capture_output=True) and None


def loaded(path: Path, threads: int) -> None:
    import torch

    torch.load(path, weights_only=True)


def best(what: Callable[[Path, int], None], path: Path, repeats: int = 5) -> tuple[float, float]:
    """(seconds, seconds of processor time), the least of each."""
    times = []
    for _ in range(repeats):
        start, used = time.perf_counter(), time.process_time()
        what(path, CORES)
        times.append((time.perf_counter() - start, time.process_time() - used))
    return min(t[0] for t in times), min(t[1] for t in times)


PEAK = """
import sys
from ckptguard.inspect import Options, audit
from ckptguard.model import Evidence
r = audit(sys.argv[1], Options(depth=Evidence(sys.argv[2]), grace=0.0))
# Not ru_maxrss: a child begins with its parent's.
most = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(r[0].checkpoints[0].coverage.bytes_read, most)
"""


def peak(path: Path, depth: str) -> tuple[int, int]:
    """(bytes read, kilobytes of memory at most) of an audit in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path), depth], capture_output=True, text=True, check=True
    )
    read, memory = done.stdout.split()
    return int(read), int(memory)


def main(gigabytes: float = 1.0, sizes: tuple[int, ...] = (1, 2, 4)) -> int:
    failed = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("CKPTGUARD_BENCH")) as folder:
        path = Path(folder) / "ckpt_100.pt"
        write_checkpoint(path, gigabytes)
        size = path.stat().st_size
        busy = os.getloadavg()[0] > CORES / 2
        reading = best(bare, path)
        print(
            f"{size / 1e9:.2f} GB in the page cache, {CORES} cores; bare reading {size / reading[0] / 1e9:.1f} GB/s"
        )
        if busy:
            print(
                "other work runs on this machine: ratios are judged by processor time, which it does not disturb"
            )
        print(f"\n{'':34}{'seconds':>9}{'GB/s':>8}{'of bare':>9}{'processor':>11}")
        wanted = {"hash and CRC": (hash_and_crc, 0.5), "content audit, all checks": (audited, 0.3)}
        others = {
            "sha256, one thread": sha256,
            "sha256sum": command("sha256sum"),
            "python -m zipfile -t": command(sys.executable, "-m", "zipfile", "-t"),
            "torch.load": loaded,
        }
        taken = {name: best(what, path) for name, (what, _) in wanted.items()}
        taken |= {name: best(what, path, 2) for name, what in others.items()}
        for name, (seconds, used) in taken.items():
            own = f"{reading[1] / used:11.2f}" if name not in ("sha256sum", "python -m zipfile -t") else ""
            print(f"{name:34}{seconds:9.2f}{size / seconds / 1e9:8.1f}{reading[0] / seconds:9.2f}{own}")
        for name, (_, least) in wanted.items():
            ratio = reading[busy] / taken[name][busy]
            if ratio < least:
                failed.append(f"{name}: {ratio:.2f} of bare reading, {least} is wanted")
        audit_time = taken["content audit, all checks"][0]
        failed += [
            f"the audit is slower than {name}" for name in others if taken[name][0] < audit_time and not busy
        ]
        read, _ = peak(path, "structure")
        print(f"\nstructure audit reads {read} bytes, 1/{size // max(1, read)} of the file")
        if read * 1000 > size:
            failed.append(f"the structure audit reads {read} of {size} bytes")
        print(f"\n{'file':>8}{'structure':>12}{'content':>12}   peak memory, MB")
        for gb in sizes:
            write_checkpoint(path, gb)
            structure, content = peak(path, "structure")[1], peak(path, "content")[1]
            print(f"{gb:>5} GB{structure / 1e3:>12.0f}{content / 1e3:>12.0f}")
    for line in failed:
        print(f"MISSED: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0))

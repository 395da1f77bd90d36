"""Which software and hardware computed the numbers: what decides whether a replay must agree bit for bit."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

PACKAGES = (
    "torch", "numpy", "transformers", "accelerate", "peft", "lightning", "deepspeed", "safetensors", "torchdata", "ckptguard",
)  # fmt: skip
LAUNCH = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
NUMERICS = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "MKL_CBWR",
    "PYTHONHASHSEED",
)


def versions() -> dict[str, str]:
    """Versions of Python and of those packages that the process has loaded."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        if package in sys.modules:
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                found[package] = str(getattr(sys.modules[package], "__version__", "unknown"))
    return found


def environment() -> dict[str, Any]:
    """What beside versions decides the bits of a result: device, processor, threads, numeric switches."""
    facts: dict[str, Any] = {"machine": platform.machine(), "system": platform.system()}
    facts |= {name: os.environ[name] for name in NUMERICS if name in os.environ}
    torch = sys.modules.get("torch")
    if torch is None:
        return facts
    facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    facts["threads"] = torch.get_num_threads()
    facts["deterministic"] = torch.are_deterministic_algorithms_enabled()
    facts["matmul_precision"] = torch.get_float32_matmul_precision()
    facts["device"] = "cpu"
    if torch.cuda.is_available():
        facts["device"] = "cuda"
        facts["device_name"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda or torch.version.hip
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        facts["cudnn_deterministic"] = torch.backends.cudnn.deterministic
    return facts


def launch() -> dict[str, str]:
    """What names this start of the job, so that the logs of several ranks can be put side by side."""
    return {name: os.environ[name] for name in LAUNCH if name in os.environ}


def rank_and_world() -> tuple[int, int]:
    """(rank, world size) of this process: of torch.distributed where it runs, else of the launcher's environment."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return _integer("RANK", 0), _integer("WORLD_SIZE", 1)


def _integer(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default

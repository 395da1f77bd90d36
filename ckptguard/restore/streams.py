"""The random generators: found in a checkpoint by the form of their states, set, and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TORCH_STATE = 5056
CUDA_STATE = 16
_FOREIGN = ("loader", "sampler", "dataset", "generator")


def find_streams(tree: Any) -> dict[str, Any]:
    """The states of python, numpy, torch and cuda in a loaded tree, whatever their keys are.

    A state of the data loader's own generator looks like torch's: keys that speak of data come last.
    """
    found: dict[str, list[tuple[bool, Any]]] = {}
    for path, value in _nodes(tree, ()):
        stream = _stream_of(path, value)
        if stream:
            foreign = any(word in key for key in path for word in _FOREIGN)
            found.setdefault(stream, []).append((foreign, value))
    return {stream: min(states, key=lambda pair: pair[0])[1] for stream, states in found.items()}


def _nodes(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every node that may be a generator's state; what was recognised is not entered."""
    yield path, tree
    if len(path) > 8 or _stream_of(path, tree):
        return
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _nodes(value, (*path, str(key).lower()))
    elif isinstance(tree, list | tuple) and len(tree) <= 64:
        for at, value in enumerate(tree):
            yield from _nodes(value, (*path, str(at)))


def _stream_of(path: tuple[str, ...], value: Any) -> str:
    if isinstance(value, list | tuple):
        if len(value) == 3 and isinstance(value[1], list | tuple) and len(value[1]) == 625:
            return "python"
        if len(value) == 5 and value[0] == "MT19937":
            return "numpy"
        if value and _named_cuda(path) and all(_bytes(item) for item in value):
            return "cuda"
        return ""
    if isinstance(value, Mapping):
        return "numpy" if value.get("bit_generator") == "MT19937" else ""
    size = _bytes(value)
    if size == TORCH_STATE and not _named_cuda(path):
        return "torch"
    return "cuda" if size == CUDA_STATE and _named_cuda(path) else ""


def _named_cuda(path: tuple[str, ...]) -> bool:
    return any("cuda" in key or "gpu" in key for key in path)


def _bytes(value: Any) -> int:
    """The length of a byte tensor, 0 for anything else."""
    if not str(getattr(value, "dtype", "")).endswith("uint8"):
        return 0
    shape = tuple(value.shape)
    return int(shape[0]) if len(shape) == 1 else 0


def set_streams(streams: Mapping[str, Any]) -> tuple[str, ...]:
    """Set this process's generators; returns the streams that were set."""
    import random

    import numpy as np
    import torch

    done = []
    if "python" in streams:
        version, internal, gauss = streams["python"]
        random.setstate((version, tuple(int(word) for word in internal), gauss))
        done.append("python")
    if "numpy" in streams:
        state = streams["numpy"]
        np.random.set_state(state if isinstance(state, dict) else tuple(state))
        done.append("numpy")
    if "torch" in streams:
        torch.set_rng_state(torch.as_tensor(streams["torch"], dtype=torch.uint8).cpu())
        done.append("torch")
    if "cuda" in streams and torch.cuda.is_available():
        states = streams["cuda"]
        states = list(states) if isinstance(states, list | tuple) else [states]
        for device, state in enumerate(states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(torch.as_tensor(state, dtype=torch.uint8).cpu(), device)
        done.append("cuda")
    return tuple(done)

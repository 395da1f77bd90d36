"""Digests of a training's tensors in memory, before they are written: what the files must hold afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckptguard.digest import tensor_facts
from ckptguard.record.fingerprints import tensor_bytes
from ckptguard.seals import SealedTensor

THREADS = 8


def sealed_tensors(parts: Mapping[str, Any]) -> dict[str, SealedTensor]:
    """COMPONENT/NAME to digest and statistics, of every module and optimizer among the parts.

    Names are those of their state dictionaries. A tensor on a device is copied to the host one at a time; of a
    distributed tensor the local shard counts. No collective operation is started.
    """
    workers = min(THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        jobs = {name: pool.submit(_seal, tensor) for name, tensor in _tensors(parts)}
        return {name: job.result() for name, job in jobs.items()}


def _seal(tensor: Any) -> SealedTensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    dtype = str(local.dtype).removeprefix("torch.")
    facts = tensor_facts(tensor_bytes(local.detach().cpu()), dtype)
    return SealedTensor(
        digest=facts.digest,
        dtype=dtype,
        shape=tuple(local.shape),
        norm=facts.norm,
        minimum=facts.minimum,
        maximum=facts.maximum,
        nan=facts.nan,
        inf=facts.inf,
    )


def _tensors(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    import torch

    for component, part in parts.items():
        if isinstance(part, torch.nn.Module):
            yield from ((f"{component}/{name}", tensor) for name, tensor in _of_module(part))
        elif isinstance(part, torch.optim.Optimizer):
            yield from ((f"{component}/{name}", tensor) for name, tensor in _of_tree(part.state_dict(), ""))


def _of_module(module: Any) -> Iterator[tuple[str, Any]]:
    """Parameters and persistent buffers under the names of the state dictionary, which itself may be a collective
    operation (FSDP) that must not be started by one rank alone."""
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _of_tree(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(tree, torch.Tensor):
        # Layouts without a dense buffer have no bytes in order.
        if tree.layout is torch.strided and not tree.is_meta:
            yield prefix, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _of_tree(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from _of_tree(value, f"{prefix}.{place}" if prefix else str(place))

"""A look at the model between two steps that leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ckptguard.record.rng import preserved_rng

BUFFER_BYTES = 64 << 20
"""Buffers are copied before and put back after; a module with more of them (a cache) is not probed."""


def run_probe(probe: Callable[[], Any], modules: Iterable[Any]) -> float:
    """The number that `probe` returns, with the modules in evaluation mode and without gradients.

    Afterwards each module and sub-module is in the mode it was in, every buffer has the value it had, and every random
    generator continues as if nothing had been drawn. Raises what `probe` raises, with the same promise.
    """
    import torch

    roots = list(modules)
    modes = [(module, module.training) for root in roots for module in root.modules()]
    buffers = [buffer for root in roots for buffer in root.buffers()]
    size = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    if size > BUFFER_BYTES:
        raise ValueError(f"the model has {size} bytes of buffers; the probe copies at most {BUFFER_BYTES}")
    copies = [buffer.detach().clone() for buffer in buffers]
    try:
        with preserved_rng(), torch.no_grad():
            for root in roots:
                root.eval()
            return float(probe())
    finally:
        for module, training in modes:
            # Not .train(): that walks into children, each of which has its own mode.
            module.training = training
        with torch.no_grad():
            for buffer, copy in zip(buffers, copies, strict=True):
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)

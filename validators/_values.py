"""Numbers of single tensors, read again where the facts of the one pass do not suffice."""

from __future__ import annotations

import numpy as np

from ckptguard.errors import FormatError, StoreError
from ckptguard.formats import load_array
from ckptguard.model import CheckpointFacts, Tensor
from ckptguard.ports import Store
from ckptguard.values import itemsize


def piece(tensor: Tensor, start: int, numel: int) -> Tensor:
    """A stretch of a contiguous tensor, as a tensor of one dimension."""
    if start == 0 and numel == tensor.numel:
        return tensor
    width = itemsize(tensor.dtype)
    value = None if tensor.value is None else tensor.value.reshape(-1)[start : start + numel]
    begin = None if tensor.start is None else tensor.start + start * width
    return Tensor(
        tensor.name,
        tensor.dtype,
        (numel,),
        begin,
        numel * width,
        (1,),
        tensor.storage,
        tensor.location,
        value=value,
    )


def numbers(store: Store, facts: CheckpointFacts, tensor: Tensor, start: int, most: int) -> np.ndarray | None:
    """Up to `most` numbers of a tensor from `start` on; None where they cannot be read (another check says why)."""
    entry = facts.manifest.file(facts.state.subject(tensor).partition(":")[0])
    numel = min(most, tensor.numel - start)
    if entry is None or numel <= 0 or not tensor.contiguous:
        return None
    try:
        found = load_array(store, entry.entry.key, entry.entry.size, piece(tensor, start, numel))
    except (FormatError, StoreError):
        return None
    return found.astype(np.float64).reshape(-1)

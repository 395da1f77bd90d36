"""State as a flat map of comparable leaves, whether it lies in a file or in a live object.

A leaf is small: a tensor is its dtype, shape and digest, so that two states of any size are compared without holding both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptguard.digest import tensor_digest
from ckptguard.model import Tensor

Path = tuple[str, ...]
Digest = Callable[[Tensor], "str | None"]
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Leaf:
    """`kind`: tensor, number, text, none, other (nothing that can be compared). `memory` tells tied tensors."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    digest: str = ""
    value: Any = None
    subject: str = ""
    memory: int = 0

    def show(self) -> str:
        """How a message names it."""
        if self.kind == "tensor" and self.value is None:
            return f"{self.dtype}{list(self.shape)}"
        return repr(self.value) if self.kind in ("tensor", "number", "text") else self.kind


def walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every non-container below `tree`, with the keys that lead to it as text."""
    if isinstance(tree, Mapping):
        if len(path) < MAX_DEPTH:
            for key, value in tree.items():
                yield from walk(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        if len(path) < MAX_DEPTH:
            for at, value in enumerate(tree):
                yield from walk(value, (*path, str(at)))
    else:
        yield path, tree


def plain_leaf(value: Any, subject: str = "") -> Leaf | None:
    """The leaf of a number, a text or None; None for anything else."""
    if value is None:
        return Leaf("none", subject=subject)
    if isinstance(value, bool | int | float):
        return Leaf("number", value=value, subject=subject)
    if isinstance(value, str | bytes):
        return Leaf("text", value=value, subject=subject)
    return None


def saved_leaves(tree: Any, subject: str, digest: Digest) -> dict[Path, Leaf]:
    """The leaves of a tree as the readers of `ckptguard.formats` give it. `digest` reads a tensor's bytes."""
    found: dict[Path, Leaf] = {}
    for path, value in walk(tree):
        where = f"{subject}:{'.'.join(path)}" if path else subject
        if isinstance(value, Tensor):
            number = value.scalar()
            found[path] = Leaf("tensor", value.dtype, tuple(value.shape), digest(value) or "", number, where)
        else:
            found[path] = (
                plain_leaf(value, where) or _array_leaf(value, where) or Leaf("other", subject=where)
            )
    return found


def live_leaves(tree: Any) -> dict[Path, Leaf]:
    """The leaves of a live object's state dictionary: torch tensors, numpy arrays, numbers."""
    import torch

    found: dict[Path, Leaf] = {}
    for path, value in walk(tree):
        if isinstance(value, torch.Tensor):
            found[path] = _tensor_leaf(value)
        else:
            found[path] = plain_leaf(value) or _array_leaf(value) or Leaf("other", value=type(value).__name__)
    return found


def _tensor_leaf(value: Any) -> Leaf:
    import torch

    tensor = value.detach()
    if hasattr(tensor, "full_tensor"):  # a DTensor: what the file holds is the whole
        tensor = tensor.full_tensor()
    number = tensor.item() if tensor.numel() == 1 and not tensor.is_quantized else None
    flat = tensor.cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy() if flat.numel() else b""
    dtype = str(tensor.dtype).removeprefix("torch.")
    memory = tensor.data_ptr() if tensor.numel() else 0
    return Leaf("tensor", dtype, tuple(tensor.shape), tensor_digest(raw), number, memory=memory)


def _array_leaf(value: Any, subject: str = "") -> Leaf | None:
    import numpy as np

    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return Leaf("number", value=value.item(), subject=subject)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        number = value.item() if value.size == 1 else None
        return Leaf("tensor", str(value.dtype), value.shape, tensor_digest(value), number, subject)
    return None


def same_number(left: Any, right: Any) -> bool:
    """Equality of two plain values in which NaN equals NaN."""
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right):
        return True
    return bool(left == right)

"""A batch's fingerprint: equal content gives equal fingerprints, in whatever containers and on whatever machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import xxhash


class OnDevice(Exception):
    """The batch lies on an accelerator: reading it would make the loop wait."""


def fingerprint(batch: Any) -> str:
    """32 hexadecimal digits for a batch: tensors and arrays by dtype, shape and bytes, containers by their order, keys
    sorted. Raises OnDevice for a tensor that is not in host memory.

    Objects of unknown classes count by their class alone. Raises TypeError for a batch that is nothing but such: equal
    fingerprints would prove nothing.
    """
    hasher = xxhash.xxh3_128()
    if not _feed(hasher, batch):
        raise TypeError(f"nothing can be read of a batch of the class {type(batch).__qualname__}")
    return hasher.hexdigest()


def join_fingerprints(micro_batches: Iterable[str]) -> str | None:
    """The fingerprint of a step from those of its micro-batches, in order; None where there was none."""
    parts = list(micro_batches)
    if len(parts) <= 1:
        return parts[0] if parts else None
    return xxhash.xxh3_128_hexdigest("".join(parts).encode())


def _feed(hasher: xxhash.xxh3_128, value: Any) -> bool:
    """Whether there was anything but classes to feed."""
    if hasattr(value, "detach") and hasattr(value, "device"):
        if value.device.type != "cpu":
            raise OnDevice(str(value.device))
        raw = tensor_bytes(value)
        hasher.update(f"array {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} ".encode())
        hasher.update(raw.data)
    elif isinstance(value, np.ndarray | np.generic):
        array = native(value)
        hasher.update(f"array {array.dtype.name} {array.shape} ".encode())
        # Objects have addresses where their bytes should be.
        hasher.update(repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes())
    elif isinstance(value, Mapping):
        hasher.update(f"dict {len(value)} ".encode())
        told = not value
        for key in sorted(value, key=str):
            hasher.update(f"{key}=".encode())
            told |= _feed(hasher, value[key])
        return told
    elif isinstance(value, list | tuple):
        hasher.update(f"list {len(value)} ".encode())
        told = not value
        for item in value:
            told |= _feed(hasher, item)
        return told
    elif isinstance(value, bytes):
        hasher.update(b"bytes " + value)
    elif value is None or isinstance(value, str | int | float | bool):
        hasher.update(f"{type(value).__name__} {value!r} ".encode())
    elif is_dataclass(value) and not isinstance(value, type):
        return _feed(hasher, {one.name: getattr(value, one.name) for one in fields(value)})
    else:
        hasher.update(f"object {type(value).__qualname__} ".encode())
        return False
    return True


def native(value: Any) -> np.ndarray:
    """The array in the byte order of this machine and in C order; a view where it is that already."""
    array = np.asarray(value)
    return array.astype(array.dtype.newbyteorder("="), order="C", copy=False)


def tensor_bytes(tensor: Any) -> np.ndarray:
    """The bytes of a torch tensor in host memory, elements in order, as a flat array. Any dtype."""
    import torch

    raw: np.ndarray = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw

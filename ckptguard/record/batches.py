"""The next few batches after a save, kept under `RUN/.ckptguard/batches/` so that steps can be replayed without the data.

`batches/x.safetensors` belongs to the checkpoint `RUN/x`. The tensors lie in the file as such; how they make up the
batches (dictionaries, lists, text, numbers) is JSON in its header: nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptguard.errors import FormatError
from ckptguard.record.fingerprints import native
from ckptguard.seals import OURS

SCHEMA = 1
FOLDER = f"{OURS}/batches"
_HEADER = "ckptguard"


@dataclass(frozen=True, slots=True)
class StepBatches:
    """What one step consumed: its micro-batches in order. `fingerprint` is that of the step."""

    step: int
    micro_batches: tuple[Any, ...]
    fingerprint: str | None = None


def batches_key(run: str, checkpoint: str, rank: int = 0) -> str:
    """The key of a checkpoint's fixed batches; ranks consume different ones."""
    name = f"{checkpoint}.safetensors" if rank == 0 else f"{checkpoint}/rank-{rank}.safetensors"
    return f"{run}/{FOLDER}/{name}" if run else f"{FOLDER}/{name}"


@dataclass(slots=True)
class FixedBatches:
    """Collects batches up to a number of steps and a number of bytes; what does not fit is left out, whole steps at a
    time. `pack` gives the file's bytes."""

    checkpoint: str
    limit: int
    budget: int
    steps: list[StepBatches] = field(default_factory=list)
    size: int = 0
    full: bool = False

    @property
    def count(self) -> int:
        return len(self.steps)

    def add(self, batches: StepBatches) -> bool:
        """Whether the step was kept. A loader may reuse its buffers: give `copied` batches."""
        need = _size(batches.micro_batches)
        if self.full or self.size + need > self.budget:
            self.full = True
            return False
        self.steps.append(batches)
        self.size += need
        self.full = self.count >= self.limit
        return True

    def pack(self) -> bytes:
        """The bytes of `batches/x.safetensors`."""
        from safetensors.torch import save

        tensors: dict[str, Any] = {}
        steps = [
            {
                "step": kept.step,
                "fingerprint": kept.fingerprint,
                "micro_batches": [
                    _flatten(micro, f"{kept.step}.{n}", tensors) for n, micro in enumerate(kept.micro_batches)
                ],
            }
            for kept in self.steps
        ]
        header = {"schema": SCHEMA, "checkpoint": self.checkpoint, "steps": steps}
        return save(tensors, metadata={_HEADER: json.dumps(header)})


def unpack(data: bytes, where: str = "batches") -> tuple[StepBatches, ...]:
    """The steps in a file of fixed batches, oldest first. Raises FormatError for anything that is none."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        (length,) = np.frombuffer(data[:8], "<u8")
        header = json.loads(json.loads(data[8 : 8 + int(length)])["__metadata__"][_HEADER])
        tensors = load(data)
        if header["schema"] != SCHEMA:
            raise FormatError(
                "bad-header", f"{where}: schema {header['schema']}; this version reads {SCHEMA}"
            )
        return tuple(
            StepBatches(
                int(step["step"]),
                tuple(_rebuild(micro, tensors) for micro in step["micro_batches"]),
                step.get("fingerprint"),
            )
            for step in header["steps"]
        )
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise FormatError("bad-header", f"{where}: no fixed batches: {error}") from None


def copied(batches: StepBatches) -> StepBatches:
    """The same batches in memory of their own, on the host."""
    return StepBatches(
        batches.step, tuple(_copy(micro) for micro in batches.micro_batches), batches.fingerprint
    )


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "device")


def _size(value: Any) -> int:
    if _is_tensor(value):
        return int(value.numel() * value.element_size())
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 8


def _copy(value: Any) -> Any:
    if _is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (
            [_copy(item) for item in value]
            if isinstance(value, list)
            else tuple(_copy(item) for item in value)
        )
    return value


def _flatten(value: Any, name: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """The JSON that describes a value; its tensors go to `tensors`."""
    if _is_tensor(value):
        tensors[name] = value.contiguous()
        return {"tensor": name}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        import torch

        tensors[name] = torch.from_numpy(native(value))
        return {"array": name}
    if isinstance(value, Mapping):
        return {
            "dict": [
                [key, _flatten(item, f"{name}.{n}", tensors)] for n, (key, item) in enumerate(value.items())
            ]
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_flatten(item, f"{name}.{n}", tensors) for n, item in enumerate(value)]}
    if value is None or isinstance(value, str | int | float | bool):
        return {"value": value}
    return {"opaque": type(value).__qualname__}


def _rebuild(described: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    ((kind, content),) = described.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind == "dict":
        return {key: _rebuild(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_rebuild(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "value":
        return content
    raise ValueError(f"a {content} cannot be kept in a file")

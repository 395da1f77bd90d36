"""Reads numbers that may lie on an accelerator without ever making the training loop wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Number = float | int


class Reading:
    """The numbers of one step, on their way to the host. Made by `read_later`."""

    def __init__(
        self, known: dict[str, Any], names: tuple[str, ...] = (), values: Any = None, event: Any = None
    ) -> None:
        self._known = known
        self._names = names
        self._values = values
        self._event = event

    def ready(self) -> bool:
        """Whether `numbers` would return at once. Never waits."""
        return not self._names or (self._event is not None and bool(self._event.query()))

    def numbers(self) -> dict[str, Any]:
        """The numbers; waits for the device where they are not there yet."""
        if self._names:
            if self._event is not None:
                self._event.synchronize()
            self._known.update(zip(self._names, self._values.tolist(), strict=True))
            self._names, self._values, self._event = (), None, None
        return self._known


def read_later(values: Mapping[str, Any]) -> Reading:
    """Start to read: numbers and host tensors are taken at once, those on a device are copied behind its queue.

    A copy is made on the device first, so that what the loop does to the tensor afterwards does not matter. On CUDA the
    copy to the host runs beside the training and an event tells when it is there; elsewhere it is read when asked for.
    """
    known: dict[str, Any] = {}
    waiting: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or hasattr(value, "full_tensor"):
            continue  # A distributed tensor is read by all ranks together, which is not ours to start.
        if not hasattr(value, "detach"):
            known[name] = value if isinstance(value, str | bool | int | float) else _plain(value)
        elif value.device.type == "cpu":
            known[name] = value.detach().item()
        else:
            waiting[name] = value.detach()
    if not waiting:
        return Reading(known)
    import torch

    first = next(iter(waiting.values()))
    wide = torch.float32 if first.device.type == "mps" else torch.float64
    stacked = torch.stack([value.reshape(()).to(first.device, wide) for value in waiting.values()])
    if first.device.type != "cuda":
        return Reading(known, tuple(waiting), stacked)
    with torch.cuda.device(first.device):
        host = torch.empty(stacked.shape, dtype=wide, pin_memory=True)
        host.copy_(stacked, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return Reading(known, tuple(waiting), host, event)


def plain_ids(ids: Any) -> list[Any] | None:
    """Sample ids as a list; None for those that a device would have to be waited for."""
    if ids is None or (hasattr(ids, "device") and getattr(ids.device, "type", "cpu") != "cpu"):
        return None
    return [_plain(item) for item in (ids.tolist() if hasattr(ids, "tolist") else ids)]


def _plain(value: Any) -> Any:
    """A JSON value for a numpy number, or what else a user gives."""
    tolist = getattr(value, "tolist", None)
    return tolist() if tolist is not None else value

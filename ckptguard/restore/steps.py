"""The step that a checkpoint is of, by its content before its name. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptguard.errors import CkptguardError
from ckptguard.model import Tensor
from ckptguard.restore.held import METADATA, open_checkpoint

_COUNTERS = ("global_step", "step", "iteration", "iter", "num_updates", "steps", "train_step", "n_iter", "it")
_INSIDE = ("trainer_state", "train_state", "training_state", "state", "progress", "meta", "metadata", "app")


def step_of(path: Path) -> int | None:
    """The optimizer step that a checkpoint states, in its content before its name; None where neither says."""
    stated = _stated_step(path)
    return stated if stated is not None else _named_step(path.name)


def _stated_step(path: Path) -> int | None:
    try:
        held = open_checkpoint(str(path))
        state = held.trainer_state()
        if state:
            return _whole(state.get("global_step"))
        if held.is_file:
            return _counter(held.tree(held.root.name))
        if METADATA in held.known:
            return _counter(held.tree(METADATA))
        for file in sorted(path.glob("*.pt")):
            if (step := _counter(held.tree(file.name))) is not None:
                return step
    except CkptguardError:
        return None  # the restore itself will say what is wrong with it
    return None


def _counter(tree: Any) -> int | None:
    if not isinstance(tree, Mapping):
        return None
    for name in _COUNTERS:
        if (step := _whole(tree.get(name))) is not None:
            return step
    for name in _INSIDE:
        inner = tree.get(name)
        if (
            isinstance(inner, Mapping)
            and (step := _counter({k: inner.get(k) for k in _COUNTERS})) is not None
        ):
            return step
    return None


def _whole(value: Any) -> int | None:
    if isinstance(value, Tensor):
        value = value.scalar()
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 0:
        return None
    return int(value) if value == int(value) else None


def _named_step(name: str) -> int | None:
    """The number that a name carries: the one after "step" or "iter", else the last one."""
    match = re.search(r"(?:step|iter(?:ation)?|ba)[=_-]?(\d+)", name)
    numbers = [match[1]] if match else re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None

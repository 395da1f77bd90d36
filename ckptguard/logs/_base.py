"""What every log reader shares: how the names that people give to their metrics become the fields of a LogRow."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ckptguard.model import LogRow

# In order of preference: where a row has several of them, the first one counts.
ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "step": ("step", "global_step", "_step", "iteration", "iter", "current_steps", "current_step", "steps"),
        "loss": (
            "loss", "train_loss", "training_loss", "loss_step", "train_loss_step", "lm_loss", "global_avg_loss", "total_loss",
        ),
        "lr": ("lr", "learning_rate", "last_lr"),
        "grad_norm": ("grad_norm", "gradient_norm", "total_norm", "gnorm", "global_grad_norm", "grad_norm_before_clip"),
        "loss_scale": ("loss_scale", "grad_scale", "scale"),
        "epoch": ("epoch", "current_epoch"),
        "attempt": ("attempt", "restart"),
    }
)  # fmt: skip
_FIELD = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
_PREFERENCE = {alias: place for aliases in ALIASES.values() for place, alias in enumerate(aliases)}
_OTHER_PHASE = re.compile(r"(?:eval|val|valid|validation|test|dev)(?:[^a-z]|$)")
_LIGHTNING_LR = re.compile(r"lr-[A-Za-z]+(?:/pg1|-1)?")
MAX_STEP = 2**53
"""Beyond it a step is no step, and floats cannot tell neighbours apart."""


def field_of(key: str) -> tuple[str, int] | None:
    """(field of LogRow, preference: lower wins) that a metric's name stands for, or None for any other metric.

    `train/loss`, `Train Loss` and `loss` are one; what belongs to an evaluation is none of them.
    """
    if _LIGHTNING_LR.fullmatch(key):
        return "lr", len(ALIASES["lr"])
    plain = key.strip().lower().replace("-", "_").replace(" ", "_")
    *groups, last = plain.split("/")
    if any(map(other_phase, [*groups, last])) or last not in _FIELD:
        return None
    return _FIELD[last], _PREFERENCE[last]


def other_phase(word: str) -> bool:
    """Whether a part of a name, in lower case, says that it is of an evaluation."""
    return _OTHER_PHASE.match(word) is not None


def number(value: object) -> float | None:
    """The number that a writer meant, NaN and infinity included; None for everything that is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def whole(value: object) -> int | None:
    """The integer that a writer meant, or None."""
    found = number(value)
    if found is None or not math.isfinite(found) or found != int(found) or abs(found) > MAX_STEP:
        return None
    return int(found)


def parse_json(text: str | bytes) -> Any:
    """The JSON value, or None for junk of any kind."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def row_of(values: Mapping[str, Any], *, span: int = 1) -> LogRow | None:
    """The row that a mapping of metric names to values makes, or None when it names no step.

    What is no field of LogRow is kept in `extra`, under the name that it was written with.
    """
    chosen: dict[str, tuple[int, Any]] = {}
    extra: dict[str, Any] = {}
    for key, value in values.items():
        place = field_of(key)
        if place is None:
            extra[key] = value
        elif place[0] not in chosen or place[1] < chosen[place[0]][0]:
            chosen[place[0]] = (place[1], value)
    step = whole(chosen["step"][1]) if "step" in chosen else None
    if step is None or step < 0:
        return None
    if "train_runtime" in values and "loss" in chosen:
        # The closing row of a Trainer states the mean of the whole run, which is no step's loss.
        extra["train_loss"] = chosen.pop("loss")[1]

    def take(name: str) -> float | None:
        return number(chosen[name][1]) if name in chosen else None

    return LogRow(
        step=step,
        loss=take("loss"),
        lr=take("lr"),
        grad_norm=take("grad_norm"),
        loss_scale=take("loss_scale"),
        epoch=take("epoch"),
        attempt=whole(chosen["attempt"][1]) if "attempt" in chosen else None,
        span=span,
        extra=MappingProxyType(extra),
    )

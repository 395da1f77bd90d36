"""DeepSpeed's universal checkpoints: a folder a parameter, and in it a file for its value and for each of its states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptguard.formats.text import as_object
from ckptguard.layouts._deepspeed_files import UNIVERSAL
from ckptguard.layouts._deepspeed_zero import recorded_shapes
from ckptguard.layouts._state import Builder
from ckptguard.model import Tensor


def add_universal(builder: Builder, prefix: str, trees: Mapping[str, Any]) -> None:
    """zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt: one parameter, or one of its states, a file."""
    states: dict[str, dict[str, Any]] = {}
    for name, tree in sorted(trees.items()):
        parts = name.split("/")
        if len(parts) != 3 or parts[0] != UNIVERSAL:
            continue
        value = tree.get("param") if isinstance(tree, dict) else tree
        kind = parts[2].removesuffix(".pt")
        if isinstance(value, Tensor):
            builder.mark(value, prefix + name)
        if kind == "fp32" and isinstance(value, Tensor):
            builder.model[parts[1]] = value
        elif value is not None:
            states.setdefault(parts[1], {})[kind] = value
    common = as_object(trees.get(f"{UNIVERSAL}/optimizer_state.pt"))
    groups = common.get("param_groups")
    if states:
        file = f"{prefix}{UNIVERSAL}/optimizer_state.pt"
        rows = [{**as_object(g), "params": []} for g in groups] if isinstance(groups, list) else []
        if rows:
            rows[0]["params"] = sorted(states)
        builder.add_optimizer({"state": states, "param_groups": rows}, file)
        for name, values in states.items():
            for kind, value in values.items():
                if isinstance(value, Tensor):
                    builder.mark(value, f"{prefix}{UNIVERSAL}/{name}/{kind}.pt")


def compare_universal(
    builder: Builder, prefix: str, models: Mapping[str, Any], trees: Mapping[str, Any]
) -> None:
    """Every trainable parameter that the model files record must have been converted."""
    folders = {
        name.split("/")[1] for name in trees if name.startswith(f"{UNIVERSAL}/") and name.endswith("/fp32.pt")
    }
    shared = {name for tree in models.values() for name in as_object(tree.get("shared_params"))}
    for name in sorted({n for tree in models.values() for n, _ in recorded_shapes(tree)} - folders - shared):
        if "expert" not in name:
            where = f"{prefix}{UNIVERSAL}/{name}/fp32.pt"
            builder.problem(
                where,
                "missing-tensor",
                "",
                f"{name} is a trainable parameter by the model file, and was not converted",
            )

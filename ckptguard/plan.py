"""The launch that is planned: how many processes, cut how, in which precision, with which optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ckptguard.errors import ConfigError, UsageError

PRECISIONS = ("fp32", "bf16", "fp16")
_SPELLINGS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "no": "fp32", "tf32": "fp32"}
_WORLD = ("world_size", "num_processes")
_SIZES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp", "tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree", "tp_size"),
    "pp": ("pp", "pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel_degree"),
    "cp": ("cp", "context_parallel_size", "context_parallel_degree", "cp_size"),
    "ep": ("ep", "expert_model_parallel_size", "expert_parallel_size", "expert_parallel_degree", "ep_size"),
}


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What is known of the next start. None: not said, so nothing is said about it either."""

    world_size: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    precision: str | None = None
    optimizer: str | None = None

    @property
    def dp(self) -> int | None:
        """Data-parallel processes; what is not said to be cut is one."""
        return None if self.world_size is None else self.world_size // self.model_parallel

    @property
    def model_parallel(self) -> int:
        return prod(n or 1 for n in (self.tp, self.pp, self.cp))


def plan_of(file: str | None, **given: int | str | None) -> LaunchPlan | None:
    """The plan from a file and from options, which come first; None where nothing was said.

    Raises UsageError for sizes that cannot be, ConfigError for a file that says nothing of a launch.
    """
    plan = read_plan(Path(file)) if file is not None else LaunchPlan()
    said = {name: value for name, value in given.items() if value is not None}
    plan = replace(plan, **said)  # type: ignore[arg-type]
    if plan == LaunchPlan():
        return None
    if plan.precision is not None:
        plan = replace(plan, precision=_precision(plan.precision))
    if plan.optimizer is not None:
        plan = replace(plan, optimizer=family_of(plan.optimizer))
    if plan.world_size is not None and plan.world_size % plan.model_parallel:
        raise UsageError(
            f"{plan.world_size} processes cannot be cut into groups of {plan.model_parallel} (tp x pp x cp)",
            "the world size is a multiple of what one copy of the model takes",
        )
    return plan


def read_plan(path: Path) -> LaunchPlan:
    """What a configuration file says of the launch: accelerate, DeepSpeed, Megatron, torchrun, training arguments."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        body = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: neither JSON nor YAML: {error}") from error
    plan = plan_in(body) if isinstance(body, Mapping) else LaunchPlan()
    if plan == LaunchPlan():
        raise ConfigError(
            f"{path}: nothing in it says how the training is launched",
            "it may hold world_size (or num_processes, or nnodes and nproc_per_node), tp, pp, cp, ep, precision, optimizer",
        )
    return plan


def plan_in(body: Mapping[str, Any]) -> LaunchPlan:
    """The plan in a file's content. Sections of launchers are looked into; unknown keys are other people's."""
    flat: dict[str, Any] = {}
    for key, value in body.items():
        if isinstance(value, Mapping) and str(key) in (
            "launch",
            "parallelism_config",
            "parallelism",
            "model",
            "training",
        ):
            flat |= {str(k): v for k, v in value.items()}
    flat |= {str(k): v for k, v in body.items()}
    flat |= {
        k.removeprefix("parallelism_config_"): v
        for k, v in flat.items()
        if k.startswith("parallelism_config_")
    }
    return LaunchPlan(
        world_size=_world(flat),
        **{name: _first(flat, keys) for name, keys in _SIZES.items()},
        precision=_precision_in(flat),
        optimizer=_optimizer_in(flat),
    )


def _world(flat: Mapping[str, Any]) -> int | None:
    direct = _first(flat, _WORLD)
    if direct is not None:
        return direct
    nodes, each = _first(flat, ("nnodes", "num_machines")), _first(flat, ("nproc_per_node", "nproc-per-node"))
    return None if each is None else each * (nodes or 1)


def _first(flat: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = flat.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _precision_in(flat: Mapping[str, Any]) -> str | None:
    for key in ("precision", "mixed_precision", "dtype"):
        named = flat.get(key)
        if isinstance(named, str):
            return _SPELLINGS.get(named, named)
    said = {}
    for name in ("fp16", "bf16"):
        value = flat.get(name)
        said[name] = value.get("enabled") if isinstance(value, Mapping) else value
    if said["fp16"] is True:
        return "fp16"
    if said["bf16"] is True:
        return "bf16"
    return "fp32" if said["fp16"] is False and said["bf16"] is False else None


def _optimizer_in(flat: Mapping[str, Any]) -> str | None:
    value = flat.get("optimizer", flat.get("optim"))
    if isinstance(value, Mapping):
        value = value.get("type", value.get("name"))
    return value if isinstance(value, str) else None


def _precision(text: str) -> str:
    plain = _SPELLINGS.get(text, text)
    if plain not in PRECISIONS:
        raise UsageError(f"precision {text!r}: expected one of {', '.join(PRECISIONS)}")
    return plain


def family_of(name: str) -> str:
    """The family of an optimizer by what people call it: adamw_torch_fused and FusedAdam are adam, adamw_8bit is not."""
    plain = name.lower().replace("-", "").replace("_", "")
    for family in (
        "adafactor",
        "adagrad",
        "adamax",
        "schedulefree",
        "lion",
        "muon",
        "shampoo",
        "soap",
        "sophia",
        "rmsprop",
        "lamb",
        "sgd",
    ):
        if family in plain:
            return family
    if "adam" in plain:
        return "adam8bit" if "8bit" in plain or "bnb" in plain else "adam"
    return plain

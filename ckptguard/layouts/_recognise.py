"""What a thing in a checkpoint is, by its form: optimizers, schedulers, scalers, weights, generators; names only where it
does not show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from ckptguard.formats.pickles import Opaque
from ckptguard.model import Tensor

STEP_NAMES = {
    "step", "steps", "global_step", "global_steps", "iteration", "iter", "iterations", "iter_num", "it", "num_updates",
    "num_steps", "current_step", "train_step", "trainer_step", "optimizer_step", "update", "updates", "steps_run",
    "completed_steps", "batch_num", "iteration_count", "last_step", "n_steps", "steps_completed", "step_count", "num_iters",
}  # fmt: skip
EPOCH_NAMES = {"epoch", "current_epoch", "epochs_run", "epoch_num", "epochs"}
EMA_NAME = re.compile(r"(^|[._-])(ema|swa|averaged?|shadow|polyak|moving_average)", re.IGNORECASE)
RNG_NAME = re.compile(r"rng|random|seed_state|generator", re.IGNORECASE)
LOADER_NAME = re.compile(
    r"loader|sampler|data_?state|data_?position|data_iter|dataset_state|^data$|datamodule", re.IGNORECASE
)
SCALER_NAME = re.compile(r"scaler|loss_scale|amp", re.IGNORECASE)
SCHEDULER_NAME = re.compile(r"sched|lr_", re.IGNORECASE)
OPTIMIZER_NAME = re.compile(r"optim|^opt$|^opt_|_opt$|adam|muon", re.IGNORECASE)
SCHEDULER_KEYS = {
    "last_epoch",
    "_step_count",
    "base_lrs",
    "_last_lr",
    "_schedulers",
    "lr_lambdas",
    "last_batch_iteration",
}
RNG_KEYS = {
    "python",
    "numpy",
    "torch",
    "cuda",
    "cpu",
    "random",
    "torch_rng_state",
    "cuda_rng_state",
    "torch_cuda",
    "cpu_rng_state",
}
WRAPPERS = (
    "module.",
    "_orig_mod.",
    "_forward_module.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
)


def scalar(value: Any) -> int | float | None:
    """A plain number, from a number or a tensor that holds one; None for anything else (and for True and False)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if isinstance(value, Tensor):
        return value.scalar()
    return None


def integer(value: Any) -> int | None:
    number = scalar(value)
    return (
        int(number)
        if number is not None and number == number and abs(number) < 1 << 62 and number == int(number)
        else None
    )


def items(value: Any) -> Mapping[Any, Any]:
    """The entries of a dictionary or of an object that was not built."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Opaque):
        state = value.state if isinstance(value.state, dict) else {}
        return {**state, **value.items}
    return {}


def is_optimizer(value: Any) -> bool:
    groups = value.get("param_groups") if isinstance(value, dict) else None
    return isinstance(groups, list) and "state" in value and all(isinstance(g, dict) for g in groups)


def is_scheduler(value: Any) -> bool:
    return isinstance(value, dict) and len(SCHEDULER_KEYS & value.keys()) >= 1 and not is_weights(value)


def is_scaler(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and "scale" in value
        and bool({"growth_factor", "_growth_tracker", "growth_tracker"} & value.keys())
    )


def is_weights(value: Any) -> TypeGuard[dict[str, Any]]:
    """A flat mapping of parameter names to tensors (bookkeeping bytes of FP8 layers and None allowed)."""
    if not isinstance(value, dict) or not value:
        return False
    tensors = sum(isinstance(v, Tensor) for v in value.values())
    return (
        tensors > 0
        and all(
            isinstance(k, str)
            and (isinstance(v, Tensor) or v is None or k.endswith("_extra_state") or isinstance(v, Opaque))
            for k, v in value.items()
        )
        and tensors * 2 >= len(value)
    )


def is_rng(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype == "uint8" and value.shape in ((5056,), (16,), (816,))
    if isinstance(value, dict):
        return (
            bool(value)
            and bool(RNG_KEYS & {str(k) for k in value})
            and not is_weights({k: v for k, v in value.items() if k != "cpu"})
        )
    if isinstance(value, tuple) and len(value) == 3 and value[0] == 3:
        return isinstance(value[1], tuple)
    return isinstance(value, tuple) and len(value) == 5 and value[0] == "MT19937"


def kind_of(tree: Any) -> str:
    """What a whole file certainly holds, in words; empty where its form does not tell."""
    if is_optimizer(tree):
        return "an optimizer"
    if is_weights(tree):
        return "weights"
    if is_scaler(tree):
        return "a loss scaler"
    if is_scheduler(tree):
        return "a scheduler"
    return "generator states" if is_rng(tree) else ""


def flatten_values(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Optimizer state of one parameter, with nested quantisation state brought up a level."""
    for key, value in values.items():
        if isinstance(value, dict) and str(key).startswith("__"):
            yield from flatten_values(value)
        elif isinstance(value, Opaque) and value.args and isinstance(value.args[0], Tensor):
            yield str(key), value.args[0]
        else:
            yield str(key), value


def unflatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested dictionaries one component deep: model.*, optimizer.state.<name>.<key>."""
    nested: dict[str, Any] = {}
    for key, value in tree.items():
        first, _, rest = key.partition(".")
        if first in ("optimizer", "optim") and rest.startswith("state."):
            name, _, field = rest.removeprefix("state.").rpartition(".")
            optimizer = nested.setdefault("optimizer", {"state": {}, "param_groups": []})
            optimizer["state"].setdefault(name, {})[field] = value
        elif first in ("model", "ema", "module") and rest:
            nested.setdefault(first, {})[rest] = value
        else:
            nested.setdefault("model" if isinstance(value, Tensor) else first, {})[key] = value
    return nested


def module_weights(value: Opaque, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a whole module that was pickled as an object."""
    state = value.state if isinstance(value.state, dict) else {}
    if depth > 64 or "_modules" not in state:
        return
    for part in ("_parameters", "_buffers"):
        for name, tensor in items(state.get(part)).items():
            if isinstance(tensor, Tensor):
                yield f"{prefix}{name}", tensor
    for name, module in items(state.get("_modules")).items():
        if isinstance(module, Opaque):
            yield from module_weights(module, f"{prefix}{name}.", depth + 1)


def nested_dicts(value: Mapping[Any, Any]) -> bool:
    """Whether a dictionary holds other components rather than being one."""
    inner = [v for v in value.values() if isinstance(v, dict)]
    return bool(inner) and all(isinstance(v, dict) for v in value.values())


def strip_wrappers(name: str) -> str:
    """A parameter's name without the prefixes that DDP, FSDP and torch.compile add, in any order and place."""
    while True:
        for wrapper in WRAPPERS:
            if name.startswith(wrapper):
                name = name[len(wrapper) :]
                break
        else:
            break
    for wrapper in WRAPPERS[1:]:
        name = name.replace(f".{wrapper}", ".")
    return name


def holds_training_state(tree: Any) -> bool:
    """Whether a tree holds model or optimizer state: what makes a lone file a checkpoint."""
    if isinstance(tree, Opaque):
        return next(module_weights(tree), None) is not None
    if is_weights(tree) or is_optimizer(tree):
        return True
    if not isinstance(tree, dict):
        return False
    return any(
        is_weights(v)
        or is_optimizer(v)
        or (isinstance(v, dict) and any(is_weights(w) or is_optimizer(w) for w in v.values()))
        for v in _some(tree.values())
    )


def _some(values: Iterable[Any]) -> Iterator[Any]:
    for i, value in enumerate(values):
        if i > 1000:
            return
        yield value

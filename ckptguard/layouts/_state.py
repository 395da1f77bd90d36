"""From a file's tree to the field's common terms: recognises optimizers, schedulers, scalers, RNG, loaders by their form.

Frameworks and users name things as they like; what a thing is shows in what it holds. Names decide only where the form
does not (averaged weights, counters, data positions).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from ckptguard.formats.pickles import Opaque
from ckptguard.model import (
    Counter,
    LoaderState,
    LogRow,
    Manifest,
    OptimizerState,
    ParamGroup,
    ParamState,
    Problem,
    RngState,
    ScalerState,
    SchedulerState,
    State,
    Tensor,
)

STEP_NAMES = {
    "step", "steps", "global_step", "global_steps", "iteration", "iter", "iterations", "iter_num", "it", "num_updates",
    "num_steps", "current_step", "train_step", "trainer_step", "optimizer_step", "update", "updates", "steps_run",
    "completed_steps", "batch_num", "iteration_count", "last_step", "n_steps", "steps_completed",
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


class Builder:
    """Collects what the files of a checkpoint hold; `build` freezes it into a State."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.model: dict[str, Tensor] = {}
        self.ema: dict[str, Tensor] = {}
        self.subjects: dict[int, str] = {}
        self.optimizers: list[OptimizerState] = []
        self.schedulers: list[SchedulerState] = []
        self.rngs: list[RngState] = []
        self.scalers: list[ScalerState] = []
        self.loaders: list[LoaderState] = []
        self.counters: list[Counter] = []
        self.problems: list[tuple[str, Problem]] = []
        self.topology: dict[str, Any] = {}
        self.replicated: list[tuple[str, Mapping[str, Any]]] = []
        self.masters: list[tuple[str, Tensor, Tensor]] = []
        self.log: list[LogRow] = []
        self.components: dict[str, bool | None] = {}
        self.attributes: dict[str, Any] = {}
        self.config: Mapping[str, Any] | None = None
        self.config_subject = "config.json"
        self.tokenizer_size: int | None = None
        self.tokenizer_subject = ""
        self.layout = ""
        self.step: int | None = None
        self.skipped_steps: int | None = None
        self.lr_multiplies = False
        self.save_id = ""
        self.gaps: tuple[str, ...] = ()
        if manifest.step is not None:
            self.counters.append(Counter("name", manifest.step, manifest.path, "step"))

    # --- pieces -------------------------------------------------------------------------------------

    def problem(self, file: str, code: str, where: str, message: str, **more: str) -> None:
        self.problems.append((file, Problem(code, where, message, **more)))

    def mark(self, tensor: Tensor, file: str, name: str = "") -> None:
        self.subjects[id(tensor)] = f"{file}:{name or tensor.name}"

    def add_model(self, tensors: Mapping[str, Any], file: str, prefix: str = "") -> None:
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                self.model[prefix + str(name)] = tensor
                self.mark(tensor, file)

    def add_ema(self, tensors: Mapping[str, Any], file: str) -> None:
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                self.ema[str(name)] = tensor
                self.mark(tensor, file)
        averaged = integer(tensors.get("n_averaged"))
        if averaged is not None:
            self.attributes["ema_updates"] = averaged

    def add_optimizer(
        self,
        value: Mapping[str, Any],
        file: str,
        *,
        rank: int | None = None,
        sharded: bool = False,
        name: str = "",
    ) -> None:
        groups = tuple(
            ParamGroup(
                {k: v for k, v in g.items() if k != "params"},
                tuple(str(p) for p in (g.get("params") or ()) if not isinstance(p, Tensor)),
            )
            for g in value.get("param_groups", ())
            if isinstance(g, dict)
        )
        states = []
        for key, entry in items(value.get("state")).items():
            values = items(entry)
            if values:
                states.append(ParamState(str(key), dict(flatten_values(values))))
        for state in states:
            for tensor in state.values.values():
                if isinstance(tensor, Tensor):
                    self.mark(tensor, file)
        named = any(not key.lstrip("-").isdigit() for g in groups for key in g.params)
        self.optimizers.append(OptimizerState(file, groups, tuple(states), rank, sharded, name, named))

    def add_scheduler(self, value: Mapping[str, Any], file: str, rank: int | None = None) -> None:
        self.schedulers.append(SchedulerState(file, value, rank))

    def add_scaler(self, value: Mapping[str, Any], file: str, rank: int | None = None) -> None:
        self.scalers.append(ScalerState(file, value, rank))

    def add_rng(self, streams: Mapping[str, Any], file: str, rank: int | None = None) -> None:
        self.rngs.append(RngState(file, rank, streams))

    def add_loader(self, value: Mapping[str, Any], file: str, rank: int | None = None) -> None:
        self.loaders.append(LoaderState(file, value, rank))

    def add_counter(self, name: str, value: Any, file: str, unit: str = "step") -> None:
        number = integer(value)
        if number is not None and number >= 0:
            self.counters.append(Counter(name, number, file, unit))

    # --- whole trees --------------------------------------------------------------------------------

    def add_tree(
        self, tree: Any, file: str, *, rank: int | None = None, depth: int = 0, path: str = ""
    ) -> None:
        """Recognise everything in a tree of any sensible shape."""
        if isinstance(tree, Opaque):
            weights = dict(module_weights(tree))
            if weights:
                self.add_model(weights, file)
                return
            tree = items(tree)
        if is_optimizer(tree):
            self.add_optimizer(tree, file, rank=rank, name=path)
            return
        if is_weights(tree) and any(str(k).startswith(("optimizer.", "optim.")) for k in tree):
            tree = unflatten(tree)
        if is_weights(tree):
            (self.add_ema if EMA_NAME.search(path) else self.add_model)(tree, file)
            return
        if is_scaler(tree):
            self.add_scaler(tree, file, rank)
            return
        if is_scheduler(tree) and not any(
            isinstance(v, dict) and (is_weights(v) or is_optimizer(v)) for v in tree.values()
        ):
            self.add_scheduler(tree, file, rank)
            return
        if isinstance(tree, list | tuple) and depth and depth < 4:
            for i, value in enumerate(tree):
                if isinstance(value, dict | Opaque):
                    self.add_tree(value, file, rank=rank, depth=depth + 1, path=f"{path}.{i}")
            return
        if not isinstance(tree, Mapping):
            return
        for key, value in tree.items():
            self._entry(str(key), value, file, rank, depth, f"{path}.{key}" if path else str(key))

    def _entry(self, key: str, value: Any, file: str, rank: int | None, depth: int, path: str) -> None:
        if key.lower() in STEP_NAMES and depth <= 2 and integer(value) is not None:
            self.add_counter(path, value, file, "step")
        elif key.lower() in EPOCH_NAMES and depth <= 2 and integer(value) is not None:
            self.add_counter(path, value, file, "epoch")
        elif SCALER_NAME.search(key) and (is_scaler(value) or value == {}):
            self.add_scaler(value, file, rank)
        elif (
            LOADER_NAME.search(key)
            and isinstance(value, dict | list | int | Opaque)
            and not is_weights(value)
        ):
            if value not in ({}, []):
                self.add_loader(value if isinstance(value, dict) else {"position": value}, file, rank)
        elif is_optimizer(value) or is_scaler(value):
            self.add_tree(value, file, rank=rank, depth=depth + 1, path=path)
        elif RNG_NAME.search(key) and self._rng(key, value, file, rank):
            pass
        elif (
            SCHEDULER_NAME.search(key)
            and isinstance(value, dict)
            and value
            and not is_weights(value)
            and not _nested_dicts(value)
        ):
            self.add_scheduler(value, file, rank)
        elif isinstance(value, dict | Opaque) and depth < 4:
            if OPTIMIZER_NAME.search(key) and isinstance(value, dict) and not value:
                return
            self.add_tree(value, file, rank=rank, depth=depth + 1, path=path)
        elif isinstance(value, list | tuple) and depth < 4 and not is_rng(value):
            self.add_tree(value, file, rank=rank, depth=depth + 1, path=path)
        elif isinstance(value, Tensor) and depth == 0 and is_rng(value):
            self._rng(key, value, file, rank)

    def _rng(self, key: str, value: Any, file: str, rank: int | None) -> bool:
        if isinstance(value, dict) and value and (is_rng(value) or any(is_rng(v) for v in value.values())):
            self.add_rng({str(k): v for k, v in value.items()}, file, rank)
            return True
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            for i, streams in enumerate(value):
                self.add_rng({str(k): v for k, v in streams.items()}, file, i)
            return True
        if is_rng(value) or (isinstance(value, list) and value and all(is_rng(v) for v in value)):
            known = next((r for r in self.rngs if r.subject == file and r.rank == rank), None)
            streams = {**(known.streams if known else {}), key: value}
            if known:
                self.rngs.remove(known)
            self.add_rng(streams, file, rank)
            return True
        return False

    # --- the result ---------------------------------------------------------------------------------

    def build(self) -> State:
        """Freeze. The step is the one that the files state, else the name's."""
        step = self.step
        if step is None:
            stated = [c for c in self.counters if c.unit == "step" and c.name != "name"]
            step = stated[0].value if stated else self.manifest.step
        present: dict[str, bool | None] = {
            "model": bool(self.model),
            "optimizer": bool(self.optimizers),
            "scheduler": bool(self.schedulers),
            "rng": bool(self.rngs),
            "scaler": True if any(s.values for s in self.scalers) else None,
            "dataloader": True if self.loaders else None,
        }
        for name in ("scheduler", "rng", "optimizer"):
            if name not in self.manifest.carries and not present[name]:
                present[name] = None
        if self.ema:
            present["ema"] = True
        if self.config is not None:
            present["config"] = True
        if self.tokenizer_size is not None:
            present["tokenizer"] = True
        return State(
            layout=self.layout or self.manifest.layout,
            model=self.model,
            ema=self.ema,
            subjects=self.subjects,
            optimizers=tuple(self.optimizers),
            schedulers=tuple(self.schedulers),
            rngs=tuple(self.rngs),
            scalers=tuple(self.scalers),
            loaders=tuple(self.loaders),
            counters=tuple(self.counters),
            config=self.config,
            config_subject=self.config_subject,
            tokenizer_size=self.tokenizer_size,
            tokenizer_subject=self.tokenizer_subject,
            topology=self.topology,
            replicated=tuple(self.replicated),
            masters=tuple(self.masters),
            log=tuple(self.log),
            step=step,
            skipped_steps=self.skipped_steps,
            components={**present, **self.components},
            problems=tuple(self.problems),
            lr_multiplies=self.lr_multiplies,
            save_id=self.save_id,
            gaps=self.gaps,
            attributes=self.attributes,
        )


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


def _nested_dicts(value: Mapping[Any, Any]) -> bool:
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

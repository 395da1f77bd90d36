"""From a file's tree to the field's common terms. Frameworks and users name things as they like; the Builder takes what it
is given by its form (see `_recognise`) and collects it into a State.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptguard.formats.pickles import Opaque
from ckptguard.layouts._recognise import (
    EMA_NAME,
    EPOCH_NAMES,
    LOADER_NAME,
    OPTIMIZER_NAME,
    RNG_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    STEP_NAMES,
    WRAPPERS,
    flatten_values,
    holds_training_state,
    integer,
    is_optimizer,
    is_rng,
    is_scaler,
    is_scheduler,
    is_weights,
    items,
    kind_of,
    module_weights,
    nested_dicts,
    scalar,
    strip_wrappers,
    unflatten,
)
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

__all__ = [
    "EMA_NAME",
    "LOADER_NAME",
    "OPTIMIZER_NAME",
    "RNG_NAME",
    "STEP_NAMES",
    "WRAPPERS",
    "Builder",
    "holds_training_state",
    "integer",
    "is_optimizer",
    "is_rng",
    "is_scaler",
    "is_weights",
    "items",
    "scalar",
    "strip_wrappers",
    "unflatten",
]

WANTED = {"optimizer": "an optimizer", "scheduler": "a scheduler", "rng": "generator states"}


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

    def is_other(self, file: str, tree: Any, wanted: str) -> bool:
        """Whether a file that should hold one component certainly holds another; then it is said what is missing."""
        held = kind_of(tree)
        if not held or held == WANTED[wanted]:
            return False
        self.components[wanted] = False
        self.problem(file, f"missing-{wanted}", "", f"it holds {held}, where {WANTED[wanted]} should be")
        return True

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
            if EMA_NAME.search(path):
                self.add_ema(tree, file)
            else:
                # A second model with the same names (a critic, a teacher) is one of its own.
                second = rank is None and any(self.model.get(str(n), t) is not t for n, t in tree.items())
                self.add_model(tree, file, f"{path}." if second and path else "")
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
        # Parameters that lie loose among the other parts, as `{"model.0.weight": ..., "step": ...}`.
        loose = {
            k: v
            for k, v in tree.items()
            if isinstance(v, Tensor) and "." in str(k) and not RNG_NAME.search(str(k))
        }
        (self.add_ema if EMA_NAME.search(path) else self.add_model)(loose, file)
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
            and not nested_dicts(value)
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

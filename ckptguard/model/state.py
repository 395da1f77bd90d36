"""What a checkpoint holds, in the field's common terms, whatever framework wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckptguard.model.manifest import Manifest
from ckptguard.model.reading import FileFacts, Problem, Tensor
from ckptguard.model.words import Evidence


@dataclass(frozen=True, slots=True)
class Counter:
    """A step that some part of the checkpoint states. `unit`: step, epoch, micro-batch, save, samples, tokens, unknown."""

    name: str
    value: int
    subject: str
    unit: str = "step"


@dataclass(frozen=True, slots=True)
class ParamState:
    """Optimizer state of one parameter: `values` maps exp_avg, step, ... to Tensors and numbers."""

    key: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One parameter group: its hyper-parameters, and the keys of its parameters in order."""

    options: Mapping[str, Any]
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """One optimizer's state dictionary. `sharded`: flat or partitioned, so shapes are not the parameters'."""

    subject: str
    groups: tuple[ParamGroup, ...]
    states: tuple[ParamState, ...]
    rank: int | None = None
    sharded: bool = False
    name: str = ""
    named: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """One learning-rate scheduler's state dictionary, as saved."""

    subject: str
    values: Mapping[str, Any]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class RngState:
    """The random generators of one process: `streams` maps python, numpy, torch, cuda to what was saved."""

    subject: str
    rank: int | None
    streams: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ScalerState:
    subject: str
    values: Mapping[str, Any]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Where a data loader stands. `values` as saved."""

    subject: str
    values: Mapping[str, Any]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class LogRow:
    """One line of a metric log. Numbers are as logged; `span` is how many steps the row averages over."""

    step: int
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    epoch: float | None = None
    attempt: int | None = None
    span: int = 1
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint holds, in the field's common terms, whatever framework wrote it.

    `model` and `ema` map parameter names to Tensors (with FILE:TENSOR in `subjects`). `topology` has world_size, tp,
    pp, ... where recorded. `layout` may name a more precise layout than the listing could, and `gaps` what that one
    never saves.
    """

    layout: str = ""
    model: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    ema: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    subjects: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    optimizers: tuple[OptimizerState, ...] = ()
    schedulers: tuple[SchedulerState, ...] = ()
    rngs: tuple[RngState, ...] = ()
    scalers: tuple[ScalerState, ...] = ()
    loaders: tuple[LoaderState, ...] = ()
    counters: tuple[Counter, ...] = ()
    config: Mapping[str, Any] | None = None
    config_subject: str = "config.json"
    tokenizer_size: int | None = None
    tokenizer_subject: str = ""
    topology: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    replicated: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    masters: tuple[tuple[str, Tensor, Tensor], ...] = ()
    log: tuple[LogRow, ...] = ()
    step: int | None = None
    skipped_steps: int | None = None
    components: Mapping[str, bool | None] = field(default_factory=lambda: MappingProxyType({}))
    problems: tuple[tuple[str, Problem], ...] = ()
    lr_multiplies: bool = False
    save_id: str = ""
    gaps: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def subject(self, tensor: Tensor, default: str = "") -> str:
        return self.subjects.get(id(tensor), default or tensor.name)


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Everything known of one checkpoint: what it claims, what its files hold, what that means."""

    manifest: Manifest
    files: Mapping[str, FileFacts]
    state: State
    evidence: Evidence
    seal: Any = None
    changed: bool = False

    @property
    def path(self) -> str:
        return self.manifest.path

    @property
    def step(self) -> int | None:
        return self.state.step if self.state.step is not None else self.manifest.step

"""The frozen data of a restore: what a child process is asked, what it saw, what is said of it. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckptguard.model import Evidence, Finding, NotRun

METRICS = ("loss", "grad_norm", "lr", "loss_scale")
EXIT_STATUS = {"continuous": 0, "diverged": 1, "failed": 1, "unproven": 3}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child process may use. `grace`: seconds between the polite stop and the kill."""

    timeout: float | None = None
    max_memory: int | None = None
    grace: float = 5.0


@dataclass(frozen=True, slots=True)
class Order:
    """What one child process is asked: restore this checkpoint with this recipe, then replay.

    `until` is the step at which the whole state is compared with the checkpoint `against`. `first` is the step that
    the checkpoint holds. `batches` is the file of recorded batches, `threads` how many the recorded training computed with,
    `seed` that of this repeat where the framework saves no random generators. With
    several `processes` they are started by torchrun. Paths are absolute.
    """

    recipe: str
    checkpoint: str
    layout: str
    device: str = "auto"
    steps: int = 8
    first: int | None = None
    until: int | None = None
    against: str | None = None
    batches: str | None = None
    scratch: str = ""
    threads: int | None = None
    seed: int | None = None
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where the restored objects hold other state than the file.

    `kind`: dropped (in the file, not in the object), defaulted (in the object, not in the file), cast, reshaped, changed,
    added (a setting that this version of the library has and the one that wrote the file had not), absent (a whole part
    for which the checkpoint holds nothing), unused (a part of the checkpoint that the recipe does not restore).
    """

    kind: str
    component: str
    path: str
    subject: str
    saved: str = ""
    restored: str = ""
    size: float | None = None


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """One replayed (or logged) optimizer step. `batch` is the fingerprint of what it consumed."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    batch: str | None = None
    span: int = 1

    def metric(self, name: str) -> float | None:
        value: float | None = getattr(self, name)
        return value


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a trial ended early. `kind`: recipe (the user's code), restore (the checkpoint was refused), misfit (the model and
    the checkpoint have other names or shapes), load (the recipe's own load() raised), usage, timeout, memory."""

    kind: str
    message: str
    hint: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one child process saw.

    `draws` maps a stream to its next draws after the restore. `compared` counts the values that were compared with the
    file; None: that stage was not reached. `state` and `against` list the differences at the start and at `until`;
    `end` is a digest of the whole state there, so that two trials can be compared. `done`: it went to its end.
    """

    environment: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    device: str = ""
    fault: Fault | None = None
    compared: int | None = None
    state: tuple[Difference, ...] = ()
    draws: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    rng_restored: tuple[str, ...] | None = None
    probe: float | None = None
    steps: tuple[StepNumbers, ...] = ()
    against_compared: int | None = None
    against: tuple[Difference, ...] = ()
    end: str = ""
    fixed_batches: bool = False
    not_run: tuple[NotRun, ...] = ()
    seconds: float = 0.0
    done: bool = False


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """One row of the log beside what the replay gave for the same steps. Numbers by metric name.

    `exact`: every number is equal as far as the log wrote it down. `ok`: within tolerance.
    """

    step: int
    ok: bool
    exact: bool
    logged: Mapping[str, float]
    replayed: Mapping[str, float]
    tolerance: Mapping[str, float]
    span: int = 1


@dataclass(frozen=True, slots=True)
class Noise:
    """How far repeats of the same restore lie apart, and how far this environment is from the one that wrote the log.

    `gap` is None where it is not known. `calibrated_on` names the earlier checkpoint that it was measured on.
    """

    repeats: int = 0
    values: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: MappingProxyType({}))
    gap: Mapping[str, tuple[float, ...]] | None = None
    calibrated_on: str | None = None

    def largest(self, metric: str) -> float | None:
        return max(self.values.get(metric, ()), default=None)


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What is said of one restore. `result`: continuous, diverged, failed or unproven. Never true or false."""

    checkpoint: str
    result: str
    evidence: Evidence
    bitwise: bool
    device: str
    steps: tuple[ComparedStep, ...]
    noise: Noise
    findings: tuple[Finding, ...]
    not_run: tuple[NotRun, ...] = ()
    checks: int = 0
    step: int | None = None
    layout: str = ""
    against: str | None = None
    compared: int = 0
    environment: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    recorded_environment: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0

    def __bool__(self) -> bool:
        raise TypeError("compare report.result; a restore is neither true nor false")

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.result]

"""What is known before a restore is judged, and the notes that its stages add up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckptguard.model import Finding, LogRow, NotRun
from ckptguard.restore.model import Difference

SILENT = frozenset({"added", "unused"})
"""Kinds of difference that do not make the restored state another one."""
DECIDING = frozenset({"model", "optimizer", "scheduler", "scaler", "dataloader"})
"""Components without which the training that goes on is another one."""


def left_out(differences: Iterable[Difference]) -> list[str]:
    """The components that the checkpoint holds, that decide how the training goes on, and that the recipe does not restore."""
    return sorted({d.component for d in differences if d.kind == "unused" and d.saved in DECIDING})


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is known of the checkpoint and of the training that went on from it.

    `rows` are the log's after the checkpoint; `column` all of them, for how finely they were written. `against` names the later checkpoint of step
    `until`. `draws` are the
    recorded next draws of each RNG stream; `gaps` what the framework never saves. `gap` is the measured distance of the
    environments, on the checkpoint `calibrated_on`; `no_gap` says why there is none.
    """

    checkpoint: str
    step: int | None = None
    layout: str = ""
    rows: tuple[LogRow, ...] = ()
    column: tuple[LogRow, ...] = ()
    draws: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    probe: float | None = None
    environment: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    gaps: tuple[str, ...] = ()
    against: str | None = None
    until: int | None = None
    gap: Mapping[str, tuple[float, ...]] | None = None
    calibrated_on: str | None = None
    no_gap: str = ""
    not_run: tuple[NotRun, ...] = ()


@dataclass(slots=True)
class Notes:
    """What the stages add up to, in the order of the contract."""

    findings: list[Finding] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    checks: int = 0
    failed: bool = False
    diverged: bool = False
    undecided: bool = False
    proven: bool = False
    exact: bool = True

    def missing(self, check: str, why: str) -> None:
        """Note what was not checked; the first reason that is known of it stands."""
        if all(known.check != check for known in self.not_run):
            self.not_run.append(NotRun(check, why))

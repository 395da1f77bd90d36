"""The jobs that there are: what each does, for what, and how often by the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptguard.jobs.audit import audit, audit_again
from ckptguard.jobs.housekeeping import housekeeping
from ckptguard.jobs.prune import prune
from ckptguard.jobs.replicate import replicate
from ckptguard.jobs.restore import restore
from ckptguard.jobs.scrub import scrub
from ckptguard.jobs.task import Task
from ckptguard.settings import RunSettings, Settings

DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Kind:
    """`every` gives the period, or None where the configuration does not want the job; `for_run` whether it is one a run."""

    name: str
    what: str
    work: Callable[[Task], str]
    every: Callable[[Settings], float | None]
    for_run: bool = True
    wants: Callable[[RunSettings], bool] = lambda run: True
    priority: int = 0


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        # New saves queue it at once; the period catches what no event told.
        Kind("audit", "judges checkpoints that have no verdict yet", audit, lambda s: DAY, priority=5),
        Kind(
            "audit-again", "reads everything that is kept again", audit_again, lambda s: s.audit.again_every
        ),
        Kind(
            "scrub",
            "reads the stalest bytes again and compares them",
            scrub,
            lambda s: s.scrub.every if s.scrub is not None else None,
            for_run=False,
        ),
        Kind(
            "restore",
            "restores a checkpoint and replays steps",
            restore,
            lambda s: s.restore.every,
            wants=lambda run: run.recipe is not None or run.command is not None,
        ),
        Kind(
            "replicate",
            "copies safe checkpoints",
            replicate,
            lambda s: min(600.0, s.replicate.late_after),
            wants=lambda run: run.replicate_to is not None,
        ),
        Kind(
            "prune",
            "rotates checkpoints, or plans to",
            prune,
            lambda s: s.prune.every if s.prune is not None else None,
        ),
        Kind("housekeeping", "forgets old history", housekeeping, lambda s: DAY, for_run=False),
    )
}


def configured(settings: Settings) -> dict[str, Kind]:
    """The jobs that this configuration wants."""
    return {name: kind for name, kind in KINDS.items() if kind.every(settings) is not None}

"""Which start of which job a process belongs to, from its environment: what all of its nodes and ranks share. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "CKPTGUARD_DECISION_ID"
"""Carries the identity from `ckptguard run` to the drop-ins inside the command that it started."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_NO_ID = frozenset({"", "none", "default", "0"})


@dataclass(frozen=True, slots=True)
class Identity:
    """`key` names one start (attempt) of a job. `shared`: other processes will ask for the same decision."""

    key: str
    shared: bool


def identify(environment: Mapping[str, str], explicit: str | None = None) -> Identity | None:
    """The start that this process belongs to, or None where nothing says that there are others.

    An attempt that a scheduler or torchrun started again must not take the decision of the one before, so every
    counter of restarts that is known is part of the key.
    """
    restart = _restart(environment)
    given = explicit or environment.get(VARIABLE)
    if given:
        return Identity(_clean(given) + restart, shared=True)
    for find in (_slurm, _elastic, _kubernetes, _mpi, _rendezvous):
        found = find(environment)
        if found is not None:
            return Identity(_clean(found) + restart, shared=True)
    return None


def _restart(environment: Mapping[str, str]) -> str:
    count = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return "" if count in ("", "0") else f"-r{_clean(count)}"


def _slurm(environment: Mapping[str, str]) -> str | None:
    """Tasks of one srun. The batch script itself is one process, and may start several attempts: it shares with nobody."""
    job, step = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID", "")
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if not job or not step.isdigit() or int(step) >= 1 << 31 or tasks == 1:
        return None
    return f"slurm-{job}-{environment.get('SLURM_RESTART_COUNT') or '0'}-{step}"


def _elastic(environment: Mapping[str, str]) -> str | None:
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if run in _NO_ID or _number(environment, "WORLD_SIZE") == 1:
        return None
    return f"elastic-{run}"


def _kubernetes(environment: Mapping[str, str]) -> str | None:
    """Pods of an Indexed Job: their host name is the job's name and their index."""
    index, host = environment.get("JOB_COMPLETION_INDEX"), environment.get("HOSTNAME", "")
    if index is None or not host.endswith(f"-{index}"):
        return None
    attempt = environment.get("JOBSET_RESTART_ATTEMPT", "0")
    return f"job-{host[: -len(index) - 1]}-{attempt}"


def _mpi(environment: Mapping[str, str]) -> str | None:
    space = environment.get("PMIX_NAMESPACE")
    if not space or _number(environment, "OMPI_COMM_WORLD_SIZE") == 1:
        return None
    return f"mpi-{space}"


def _rendezvous(environment: Mapping[str, str]) -> str | None:
    """Ranks that were started with nothing but the address at which they meet."""
    world, place = _number(environment, "WORLD_SIZE"), environment.get("MASTER_ADDR")
    if not place or world is None or world < 2:
        return None
    return f"rendezvous-{place}-{environment.get('MASTER_PORT', '')}"


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def _clean(text: str) -> str:
    """A part of a file name, whatever the text holds."""
    return _UNSAFE.sub("_", text)[:120]

"""Pure: work at risk. If the job died now, how much lies between now and the newest checkpoint that is proven safe?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptguard.model import Evidence, Resume


@dataclass(frozen=True, slots=True)
class Known:
    """What the catalog knows of one checkpoint that is still there."""

    path: str
    step: int | None
    completed: float | None
    resume: Resume
    evidence: Evidence
    as_complete: bool


@dataclass(frozen=True, slots=True)
class Risk:
    """`steps` and `seconds` are None where nothing tells them. With no safe checkpoint everything is at risk."""

    steps: int | None
    seconds: float | None
    gpu_hours: float | None
    newest_safe: str | None
    evidence: Evidence | None

    def document(self) -> dict[str, Any]:
        """`work_at_risk` of the contract."""
        return {
            "steps": self.steps,
            "seconds": None if self.seconds is None else round(self.seconds, 1),
            "gpu_hours": None if self.gpu_hours is None else round(self.gpu_hours, 2),
            "newest_safe": self.newest_safe,
            "evidence": None if self.evidence is None else str(self.evidence),
        }


def newest_safe(known: Sequence[Known]) -> Known | None:
    """The newest checkpoint that was judged safe; one that was only listed proves nothing."""
    return max((k for k in known if k.resume.safe and k.evidence > Evidence.LISTING), key=_age, default=None)


def resume_from(known: Sequence[Known]) -> Known | None:
    """The newest one that is as complete as the run allows."""
    safe = (k for k in known if k.resume.safe and k.as_complete and k.evidence > Evidence.LISTING)
    return max(safe, key=_age, default=None)


def _age(known: Known) -> tuple[bool, int, float]:
    return (known.step is not None, known.step or 0, known.completed or 0.0)


def work_at_risk(
    known: Sequence[Known],
    *,
    now: float,
    step: int | None,
    step_at: float | None,
    step_seconds: float | None,
    started: float | None,
    running: bool,
    gpus: int | None,
) -> Risk:
    """What would be lost. A run that stands still loses nothing more: its time ends with its last logged step.

    `started` is when the run was first seen to work: all since then is at risk when there is no safe checkpoint.
    """
    safe = resume_from(known) or newest_safe(known)
    end = now if running or step_at is None else step_at
    since = safe.completed if safe is not None else started
    steps: int | None = None
    if step is not None and step_at is not None:
        # A log is read from time to time: what was saved after its last known line is ahead of it.
        saved = [k.step for k in known if k.step is not None and (k.completed or 0.0) > step_at]
        step = max([step, *saved])
    if step is not None and (safe is None or safe.step is not None):
        steps = max(0, step - ((safe.step or 0) if safe is not None else 0))
    elif safe is not None and safe.step is not None:
        ahead = [k.step for k in known if k.step is not None]
        steps = max(ahead) - safe.step if ahead else 0
    elapsed: float | None = None
    if steps is not None and step_seconds is not None:
        # Steps times their usual duration: a queue gap between two attempts is no lost work.
        elapsed = steps * step_seconds
    elif since is not None:
        elapsed = max(0.0, end - since)
    hours = None if elapsed is None or gpus is None else elapsed * gpus / 3600.0
    return Risk(
        steps,
        elapsed,
        hours,
        safe.path if safe is not None else None,
        safe.evidence if safe is not None else None,
    )

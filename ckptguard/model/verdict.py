"""What is said of a checkpoint and of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptguard.model.words import Effect, Evidence, Resume, Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was seen. `subject` is FILE, or FILE:TENSOR where the tensor is known.

    `silenced`: why somebody made it an information that by itself it is not.
    """

    code: str
    severity: Severity
    effect: Effect
    subject: str
    message: str
    hint: str = ""
    silenced: str = ""

    @property
    def loud(self) -> bool:
        return self.severity > Severity.INFO


@dataclass(frozen=True, slots=True)
class NotRun:
    """A check that did not run, and why: a gap, never a success."""

    check: str
    why: str


@dataclass(frozen=True, slots=True)
class Coverage:
    checks: int = 0
    not_run: tuple[NotRun, ...] = ()
    bytes_read: int = 0
    bytes_proven: int = 0
    unprovable: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the training was well around this step, from its curves: another fact than integrity."""

    status: str = "unknown"
    since_step: int | None = None
    steps_to_discard: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of one checkpoint. Never true or false: compare `resume`.

    `seen` are the files that it was said of: name, size, time and entity tag of each.
    """

    path: str
    layout: str
    step: int | None
    resume: Resume
    evidence: Evidence
    files: int
    bytes: int
    components: Mapping[str, bool | None]
    gaps: tuple[str, ...]
    coverage: Coverage
    health: Health
    findings: tuple[Finding, ...]
    attempt: int | None = None
    modified: float = 0.0
    seen: tuple[tuple[str, int, float, str | None], ...] = ()

    def __bool__(self) -> bool:
        raise TypeError("compare verdict.resume; a verdict is neither true nor false")

    @property
    def as_complete_as_the_run_allows(self) -> bool:
        """Exact, or lossy in nothing but what the run is configured not to save (those findings are info)."""
        if self.resume is Resume.EXACT:
            return True
        # What the planned launch would lose is lost with every checkpoint of the run.
        return self.resume is Resume.LOSSY and not any(
            f.effect is Effect.LOSSY and (f.loud or f.silenced) and f.code != "launch-mismatch"
            for f in self.findings
        )


@dataclass(frozen=True, slots=True)
class RunReport:
    """What is said of one run. `checkpoints` is sorted by step, those without a known step first."""

    target: str
    root: str
    checkpoints: tuple[Verdict, ...]
    findings: tuple[Finding, ...]
    latest: str | None
    newest_safe: str | None
    resume_from: str | None

    def __bool__(self) -> bool:
        raise TypeError("look at the verdicts; a report is neither true nor false")

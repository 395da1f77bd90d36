"""Pure decisions: findings and coverage become a verdict; verdicts become what to resume from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckptguard.codes import finding
from ckptguard.model import (
    CheckpointFacts,
    Coverage,
    Effect,
    Evidence,
    Finding,
    Health,
    Resume,
    Verdict,
)

_COPY = re.compile(
    r"(?:\s\(\d+\)|[\s._-]+(?:copy|bak|backup|old|orig))(?:[\s._-]?\(?\d+\)?)?(?:\.\w+)*$", re.IGNORECASE
)
_DIGITS = re.compile(r"(\d+)")


def worst_effect(findings: Iterable[Finding]) -> Effect:
    return max((f.effect for f in findings), key=lambda e: e.rank, default=Effect.NONE)


def resume_of(findings: Sequence[Finding], *, writing: bool = False) -> Resume:
    """The worst effect as a word. A save that is still being written is no fault."""
    if writing:
        return Resume.WRITING
    return {
        Effect.NONE: Resume.EXACT,
        Effect.LOSSY: Resume.LOSSY,
        Effect.UNKNOWN: Resume.UNKNOWN,
        Effect.UNSAFE: Resume.UNSAFE,
    }[worst_effect(findings)]


def is_writing(facts: CheckpointFacts, findings: Sequence[Finding], now: float, grace: float) -> bool:
    """Not finished, and changed within the grace period: young and incomplete is a save in progress."""
    if now - facts.manifest.modified >= grace:
        return False
    unfinished = not facts.manifest.finished or any(f.effect is Effect.UNSAFE for f in findings)
    return unfinished and not any(
        f.code in ("unsafe-pickle", "crc-mismatch", "digest-mismatch", "nonfinite-weights")
        and f.effect is Effect.UNSAFE
        for f in findings
    )


def judge(
    facts: CheckpointFacts,
    findings: Sequence[Finding],
    coverage: Coverage,
    *,
    path: str,
    now: float,
    grace: float,
    required: Evidence | None = None,
    health: Health | None = None,
) -> Verdict:
    """The verdict on one checkpoint. Pure: the same facts give the same verdict.

    `required`: anything less proven counts as unknown.
    """
    shown = sorted(findings, key=lambda f: (-f.severity.rank, -f.effect.rank, f.code, f.subject))
    writing = is_writing(facts, findings, now, grace)
    resume = resume_of(findings, writing=writing)
    if writing:
        shown = [f for f in shown if not f.loud]
    verdict = Verdict(
        path=path,
        layout=facts.state.layout or facts.manifest.layout,
        step=facts.step,
        resume=resume,
        evidence=facts.evidence,
        files=len(facts.manifest.files),
        bytes=facts.manifest.size,
        components=dict(facts.state.components),
        gaps=facts.manifest.gaps or facts.state.gaps,
        coverage=coverage,
        health=health or Health(),
        findings=tuple(shown),
        attempt=facts.state.attributes.get("attempt"),
        modified=facts.manifest.modified,
        seen=tuple((f.name, *f.entry.identity) for f in facts.manifest.files),
    )
    return require(verdict, required)


def require(verdict: Verdict, required: Evidence | None) -> Verdict:
    """The verdict, unknown where it is less proven than was asked for."""
    if required is None or verdict.evidence >= required or not verdict.resume.safe:
        return verdict
    why = finding(
        "unverifiable",
        verdict.path,
        f"proven by {verdict.evidence} only, and {required} was required",
        "look deeper (--depth), or prove it: ckptguard restore CHECKPOINT",
        effect=Effect.UNKNOWN,
    )
    return replace(verdict, resume=Resume.UNKNOWN, findings=(*verdict.findings, why))


def age_of(v: Verdict) -> tuple[object, ...]:
    """Sorts verdicts, oldest first: by step, then attempt, then time; one without a known step comes before all others.

    Of the same save a copy (`checkpoint-6 (1)`, `last.bak`) comes first. Where all else is equal, as in a copied tree, the
    numbers in the names decide.
    """
    return (v.step is not None, v.step or 0, v.attempt or 0, not is_copy(v.path), v.modified, natural(v.path))


def newest_first(verdicts: Iterable[Verdict]) -> list[Verdict]:
    return sorted(verdicts, key=age_of, reverse=True)


def is_copy(path: str) -> bool:
    """Whether a name is what people and file managers make of another one when they copy it."""
    return bool(_COPY.search(path.rpartition("/")[2]))


def natural(path: str) -> tuple[tuple[int, str], ...]:
    """A name as text and numbers in turn, so that 8 comes before 12."""
    return tuple((int(p), "") if p.isdecimal() else (-1, p) for p in _DIGITS.split(path))


def newest_safe(verdicts: Iterable[Verdict]) -> Verdict | None:
    return next((v for v in newest_first(verdicts) if v.resume.safe), None)


def resume_from(
    verdicts: Sequence[Verdict],
    *,
    allow_lossy: bool = False,
    siblings: Iterable[Mapping[str, bool | None]] = (),
) -> Verdict | None:
    """The newest that is as complete as the run allows; with `allow_lossy` the newest safe one.

    `siblings` are the components of further checkpoints of the run. What one of them has, the run does not lack: a last
    save of the model alone (torchtitan's, by default) is passed over for the one before it.
    """
    if allow_lossy:
        return newest_safe(verdicts)
    parts = (*(v.components for v in verdicts), *siblings)
    held = {name for components in parts for name, there in components.items() if there}
    return next(
        (v for v in newest_first(verdicts) if v.as_complete_as_the_run_allows and not _lacks(v) & held), None
    )


def _lacks(verdict: Verdict) -> set[str]:
    """The components whose absence makes a checkpoint lossy."""
    return {
        f.code.removeprefix("missing-")
        for f in verdict.findings
        if f.effect is Effect.LOSSY and f.code.startswith("missing-")
    }

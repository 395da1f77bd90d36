"""Runs the checks on facts: what they find, and what they could not look at. No I/O of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckptguard.codes import finding
from ckptguard.errors import CkptguardError
from ckptguard.model import CheckpointFacts, Coverage, Effect, Evidence, Finding, NotRun, Severity
from ckptguard.ports import RunSubject, Subject
from ckptguard.registry import checks, run_checks

SHOWN_PER_FILE = 8


def run_checkpoint_checks(subject: Subject) -> tuple[list[Finding], Coverage]:
    """All checks that the evidence allows. A check that raises becomes a finding and a gap."""
    facts = subject.facts
    found: list[Finding] = []
    ran, not_run = 0, []
    for check in checks():
        if check.needs > facts.evidence:
            not_run.append(NotRun(check.name, f"needs evidence {check.needs}"))
            continue
        try:
            found += check.run(subject)
            ran += 1
        except CkptguardError as e:
            found.append(
                finding("unreadable", facts.path, f"the check {check.name} could not read what it needs: {e}")
            )
            not_run.append(NotRun(check.name, str(e)))
        except Exception as e:  # noqa: BLE001 - one check's fault must not hide the others' findings
            found.append(
                finding(
                    "check-failed", facts.path, f"the check {check.name} failed with {type(e).__name__}: {e}"
                )
            )
            not_run.append(NotRun(check.name, f"{type(e).__name__}: {e}"))
    broken = facts.state.attributes.get("broken_layout")
    if broken:
        found.append(
            finding(
                "check-failed",
                facts.path,
                f"the layout {facts.manifest.layout} failed on this checkpoint: {broken}",
            )
        )
    return collapse(found), coverage_of(facts, ran, not_run)


def coverage_of(facts: CheckpointFacts, ran: int, not_run: Sequence[NotRun]) -> Coverage:
    kinds = sorted(
        {
            f.kind
            for f in facts.files.values()
            if f.tensors and f.bytes_read and f.bytes_proven == 0 and f.checksummed == 0
        }
    )
    unprovable = ""
    if facts.evidence >= Evidence.CONTENT and kinds:
        unprovable = f"{', '.join(kinds)} payload: no checksum{'' if facts.seal else ', no seal'}"
    return Coverage(
        checks=ran,
        not_run=tuple(not_run),
        bytes_read=sum(f.bytes_read for f in facts.files.values()),
        bytes_proven=sum(f.bytes_proven for f in facts.files.values()),
        unprovable=unprovable,
    )


def collapse(findings: Iterable[Finding]) -> list[Finding]:
    """At most a few findings of one code for one file, the last of which counts the rest."""
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for one in dict.fromkeys(findings):
        groups[one.code, one.subject.partition(":")[0]].append(one)
    kept: list[Finding] = []
    for members in groups.values():
        worst = sorted(members, key=lambda f: (-f.effect.rank, -f.severity.rank))
        kept += worst[: SHOWN_PER_FILE - 1] if len(worst) > SHOWN_PER_FILE else worst
        if len(worst) > SHOWN_PER_FILE:
            rest = worst[SHOWN_PER_FILE - 1]
            kept.append(
                replace(rest, message=f"{rest.message} (and {len(worst) - SHOWN_PER_FILE} more like it)")
            )
    return kept


def silence(one: Finding, silenced: Mapping[str, str]) -> Finding:
    """A silenced finding is still listed, as information with the reason; its effect on the resume stays."""
    reason = silenced.get(one.code)
    if reason is None or one.severity is Severity.INFO:
        return one
    message = f"{one.message} (silenced: {reason})"
    return replace(one, severity=Severity.INFO, message=message, silenced=reason)


def run_run_checks(subject: RunSubject) -> list[Finding]:
    found: list[Finding] = []
    for check in run_checks():
        try:
            found += check.run(subject)
        except Exception as e:  # noqa: BLE001
            found.append(
                finding(
                    "check-failed",
                    subject.root.path or ".",
                    f"the check {check.name} failed with {type(e).__name__}: {e}",
                    effect=Effect.NONE,
                )
            )
    return found

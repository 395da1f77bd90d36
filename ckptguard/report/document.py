"""The contract's JSON documents, from reports."""

from __future__ import annotations

from typing import Any

from ckptguard.errors import CkptguardError
from ckptguard.model import Finding, RunReport, Verdict

SCHEMA = 1


def finding_document(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": str(finding.severity),
        "effect": str(finding.effect),
        "subject": finding.subject,
        "message": finding.message,
        "hint": finding.hint,
    }


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    coverage, health = verdict.coverage, verdict.health
    return {
        "path": verdict.path,
        "layout": verdict.layout,
        "step": verdict.step,
        "resume": str(verdict.resume),
        "evidence": str(verdict.evidence),
        "files": verdict.files,
        "bytes": verdict.bytes,
        "components": dict(verdict.components),
        "gaps": list(verdict.gaps),
        "coverage": {
            "checks": coverage.checks,
            "not_run": [{"check": n.check, "why": n.why} for n in coverage.not_run],
            "bytes_read": coverage.bytes_read,
            "bytes_proven": coverage.bytes_proven,
            "unprovable": coverage.unprovable,
        },
        "health": {
            "status": health.status,
            "since_step": health.since_step,
            "steps_to_discard": health.steps_to_discard,
        },
        "findings": [finding_document(f) for f in verdict.findings],
    }


def report_document(report: RunReport) -> dict[str, Any]:
    """The document of `audit` for one run."""
    return {
        "schema": SCHEMA,
        "target": report.target,
        "checkpoints": [verdict_document(v) for v in report.checkpoints],
        "findings": [finding_document(f) for f in report.findings],
        "latest": report.latest,
        "newest_safe": report.newest_safe,
        "resume_from": report.resume_from,
    }


def reports_document(reports: tuple[RunReport, ...]) -> dict[str, Any] | list[dict[str, Any]]:
    documents = [report_document(r) for r in reports]
    return documents[0] if len(documents) == 1 else documents


def error_document(error: CkptguardError) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "error": {"code": error.error_code, "message": error.message, "hint": error.hint},
    }

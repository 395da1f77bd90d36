"""The JSON document of a restore, as the contract states it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckptguard.restore.model import ComparedStep, RestoreReport


def restore_document(report: RestoreReport) -> dict[str, Any]:
    """The document; `coverage` and `environment` say what the result rests on."""
    noise = report.noise
    return {
        "schema": 1,
        "checkpoint": report.checkpoint,
        "layout": report.layout,
        "step": report.step,
        "result": report.result,
        "evidence": report.evidence.value,
        "bitwise": report.bitwise,
        "device": report.device,
        "steps": [_step(step) for step in report.steps],
        "against": report.against,
        "noise": {
            "repeats": noise.repeats,
            **{metric: plain(noise.largest(metric)) for metric in ("loss", "grad_norm")},
            "gap": None
            if noise.gap is None
            else {m: plain(max(c, default=0.0)) for m, c in noise.gap.items()},
            "calibrated_on": noise.calibrated_on,
        },
        "findings": [
            {
                "code": f.code,
                "severity": f.severity.value,
                "effect": f.effect.value,
                "subject": f.subject,
                "message": f.message,
                "hint": f.hint,
            }
            for f in report.findings
        ],
        "coverage": {
            "checks": report.checks,
            "values_compared": report.compared,
            "not_run": [{"check": n.check, "why": n.why} for n in report.not_run],
        },
        "environment": dict(report.environment),
        "recorded_environment": dict(report.recorded_environment),
        "seconds": round(report.seconds, 3),
    }


def _step(step: ComparedStep) -> dict[str, Any]:
    return {
        "step": step.step,
        "ok": step.ok,
        "exact": step.exact,
        "span": step.span,
        "logged": _numbers(step.logged),
        "replayed": _numbers(step.replayed),
        "tolerance": _numbers(step.tolerance),
    }


def _numbers(values: Mapping[str, float]) -> dict[str, float | str | None]:
    return {metric: plain(value) for metric, value in values.items()}


def plain(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity: they are written as text."""
    return value if value is None or math.isfinite(value) else str(value)

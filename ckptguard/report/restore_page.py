"""The picture of a restore: verdict in words, logged against replayed curves, findings, environment. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ckptguard.model import Severity
from ckptguard.report.page import facts, page, table
from ckptguard.report.plot import Band, Line, line_chart
from ckptguard.restore.model import ComparedStep, RestoreReport
from ckptguard.restore.words import headline, number, reasons

_TONE = {"continuous": "good", "diverged": "bad", "failed": "bad", "unproven": "unsure"}
_CURVES = (
    ("loss", "Loss"),
    ("grad_norm", "Gradient norm (before clipping)"),
    ("lr", "Learning rate"),
    ("loss_scale", "Loss scale"),
)


def restore_page(report: RestoreReport) -> str:
    """One self-contained HTML document."""
    return page(
        f"{report.result}: {report.checkpoint}",
        [
            f'<h1>Restore of <span class="mono">{escape(report.checkpoint)}</span></h1>',
            _verdict(report),
            _facts(report),
            *_curves(report.steps),
            *_findings(report),
            *_gaps(report),
            *_environment(report),
        ],
    )


def _verdict(report: RestoreReport) -> str:
    lines = "".join(f"<p>{escape(line)}</p>" for line in reasons(report))
    return f'<div class="verdict {_TONE[report.result]}"><strong>{escape(headline(report))}</strong>{lines}</div>'


def _facts(report: RestoreReport) -> str:
    noise = report.noise
    largest = noise.largest("loss")
    gap = "not measured"
    if noise.gap is not None:
        gap = f"measured on {noise.calibrated_on}" if noise.calibrated_on else "none: the same environment"
    return facts(
        [
            ("step", "not known" if report.step is None else str(report.step)),
            ("layout", report.layout),
            ("device", report.device or "not known"),
            ("evidence", report.evidence.value),
            ("values compared with the file", f"{report.compared:,}"),
            ("steps compared with the log", str(len(report.steps))),
            ("whole state compared with", report.against or "nothing"),
            ("repeats", str(noise.repeats)),
            ("noise between repeats (loss)", "not measured" if largest is None else number(largest)),
            ("gap between environments", gap),
            ("time taken", f"{report.seconds:.1f} s"),
        ]
    )


def _curves(steps: Sequence[ComparedStep]) -> list[str]:
    parts = []
    for metric, title in _CURVES:
        there = [step for step in steps if metric in step.logged]
        if not there:
            continue
        logged = [(float(s.step), s.logged[metric]) for s in there]
        replayed = [(float(s.step), s.replayed[metric]) for s in there]
        band = [
            (float(s.step), s.logged[metric] - s.tolerance[metric], s.logged[metric] + s.tolerance[metric])
            for s in there
        ]
        chart = line_chart(
            title,
            [Line("logged", logged, "logged"), Line("replayed", replayed, "replayed", dots=True)],
            Band(band),
        )
        parts.append(f"<h2>{escape(title)}</h2>{_legend(metric, there)}{chart}")
    if parts:
        parts.append(_numbers(steps))
    return parts


def _legend(metric: str, steps: Sequence[ComparedStep]) -> str:
    off = max(abs(s.logged[metric] - s.replayed[metric]) for s in steps)
    allowed = max(s.tolerance[metric] for s in steps)
    said = "equal in every step" if off == 0 else f"largest difference {number(off)}"
    band = "no tolerance: must be equal" if allowed == 0 else f"tolerance, at most {number(allowed)}"
    return (
        '<p class="legend"><span class="logged">logged</span><span class="replayed">replayed</span>'
        f'<span class="band">{escape(band)}</span>{escape(said)}</p>'
    )


def _numbers(steps: Sequence[ComparedStep]) -> str:
    metrics = [metric for metric, _ in _CURVES if any(metric in step.logged for step in steps)]
    heads = ["step", *(f"{metric} {what}" for metric in metrics for what in ("logged", "replayed")), ""]
    rows = []
    for step in steps:
        cells = [
            f"{values[metric]:.9g}" if metric in values else ""
            for metric in metrics
            for values in (step.logged, step.replayed)
        ]
        rows.append([str(step.step), *cells, "equal" if step.exact else "within" if step.ok else "differs"])
    marks = ["number"] * (len(heads) - 1) + [""]
    return f"<details><summary>All numbers</summary>{table(heads, rows, marks)}</details>"


def _findings(report: RestoreReport) -> list[str]:
    if not report.findings:
        return ["<h2>Findings</h2>", '<p class="quiet">None.</p>']
    order = sorted(report.findings, key=lambda f: -Severity(f.severity).rank)
    rows = [(f.severity.value, f.code, f.subject, f.message, f.hint) for f in order]
    return ["<h2>Findings</h2>", table(["severity", "code", "subject", "what was seen", "what to do"], rows)]


def _gaps(report: RestoreReport) -> list[str]:
    if not report.not_run:
        return []
    rows = [(gap.check, gap.why) for gap in report.not_run]
    return ["<h2>What could not be proven</h2>", table(["check", "why"], rows)]


def _environment(report: RestoreReport) -> list[str]:
    recorded, here = report.recorded_environment, report.environment
    names = sorted(recorded.keys() | here.keys())
    if not names:
        return []
    rows = [
        (
            name,
            str(recorded.get(name, "not recorded")),
            str(here.get(name, "not known")),
            "" if name not in recorded or name not in here or recorded[name] == here[name] else "differs",
        )
        for name in names
    ]
    return ["<h2>Environment</h2>", table(["", "that trained", "that restored", ""], rows)]

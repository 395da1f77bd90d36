"""Pure: what the pages say, from rows of the catalog. Templates only lay it out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckptguard.jobs.hints import meant
from ckptguard.report.plot import Line, Mark, line_chart
from ckptguard.units import duration, size
from ckptguard.web import charts
from ckptguard.web.present import full_path

VERDICTS = {
    "exact": "Everything that this framework saves for continuing is there, intact and consistent.",
    "lossy": "It loads, but training state is missing or inconsistent: the training will not continue as it was.",
    "unsafe": "Do not resume from it.",
    "unknown": "It could not be decided whether it is safe; until then do not resume from it.",
    "writing": "It is still being written.",
}
PROOFS = {
    "listing": "Only its files were listed.",
    "structure": "Headers, indexes and small state were read and cross-checked; the bulk of its bytes was not.",
    "content": "Every byte was read: checksums, digests and values were checked.",
    "restored": "It was loaded into real objects, which hold what the file holds.",
    "replayed": "It was restored, and training steps were repeated and compared with the log.",
}


def with_shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's row with the verdict that holds for its present bytes."""
    current = row["judged_fingerprint"] == row["fingerprint"] and row["judged_fingerprint"] != ""
    writing = row["phase"] in ("started", "growing", "stalled")
    return {
        **row,
        "shown_resume": "writing" if writing else row["resume"] if current else "unknown",
        "shown_evidence": row["evidence"] if current else "listing",
    }


def risk_words(risk: Mapping[str, Any] | None) -> dict[str, str]:
    """Work at risk: the one number, what it is in other units, and since when."""
    if not risk:
        return {"number": "unknown", "more": "", "since": "nothing is known of this run yet"}
    parts = []
    if risk["steps"] is not None:
        parts.append(f"{risk['steps']:,} steps" if risk["steps"] != 1 else "1 step")
    if risk["seconds"] is not None:
        parts.append(duration(risk["seconds"]))
    if risk["gpu_hours"] is not None:
        parts.append(f"{risk['gpu_hours']:,.1f} GPU-hours")
    since = (
        f"since {risk['newest_safe']}, proven by {risk['evidence']}"
        if risk["newest_safe"]
        else "no checkpoint is proven safe"
    )
    return {"number": parts[0] if parts else "unknown", "more": ", ".join(parts[1:]), "since": since}


def risk_tone(run: Mapping[str, Any]) -> str:
    """good, unsure or bad: how the overview colours a run."""
    if run["error"] or run["errors"]:
        return "bad"
    risk = run["work_at_risk"] or {}
    if not risk.get("newest_safe"):
        return "unsure" if not run["counts"].get("unsafe") else "bad"
    return "unsure" if run["alerts"] else "good"


def run_summary(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run for the overview and for the head of its own page."""
    trend = run["trend"]
    return {
        **run,
        "risk": risk_words(run["work_at_risk"]),
        "tone": risk_tone(run),
        "safe": full_path(run["target"], run["newest_safe"]),
        "spark": charts.sparkline(trend, f"the last {len(trend)} saves took up to {duration(max(trend))}")
        if trend
        else "",
        "last_save": duration(trend[-1]) if trend else None,
        "progress": _progress(run),
        "habits": usual_words(run["usual"]),
    }


def _progress(run: Mapping[str, Any]) -> str:
    if run["step"] is None:
        return ""
    return (
        f"step {run['step']:,} of {run['total_steps']:,}" if run["total_steps"] else f"step {run['step']:,}"
    )


def loss_chart(
    curve: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]],
    anomalies: Sequence[Mapping[str, Any]],
) -> str:  # fmt: skip
    """The loss with saves, resumes and anomalies marked. Each attempt is a curve of its own."""
    by_attempt: dict[int, list[tuple[float, float]]] = {}
    for row in curve:
        loss = row["loss"] if row["loss"] is not None else math.nan
        by_attempt.setdefault(row["attempt"], []).append((float(row["step"]), loss))
    lines = [Line(f"attempt {number}", points, "logged") for number, points in sorted(by_attempt.items())]
    marks = [Mark(float(r["step"]), f"saved {r['path']}", "save") for r in rows if r["step"] is not None]
    marks += [
        Mark(float(a["first_step"]), f"resumed: attempt {a['number']}", "resume")
        for a in attempts
        if a["number"] > 1
    ]
    marks += [
        Mark(float(a["first_step"]), f"{a['code']}: {a['evidence']}", "anomaly")
        for a in anomalies
        if a["first_step"] is not None
    ]
    return line_chart("Loss", lines, marks=marks)


def save_charts(saves: Sequence[Mapping[str, Any]], usual: Mapping[str, Any] | None) -> tuple[str, str]:
    """Save time and checkpoint size over the last saves."""
    last = saves[-80:]
    habit = usual or {}
    times = [(f"step {s['step']}", s["seconds"]) for s in last if s["seconds"] is not None]
    sizes = [(f"step {s['step']}", float(s["bytes"])) for s in last]
    return (
        charts.bars("Save time", times, duration, habit.get("seconds")),
        charts.bars("Checkpoint size", sizes, size, habit.get("bytes")),
    )


def replay_charts(document: Mapping[str, Any]) -> list[str]:
    """Logged against replayed values of a restore, metric by metric."""
    steps = [s for s in document.get("steps") or () if isinstance(s, Mapping)]
    drawn = []
    for metric, title in (("loss", "Loss"), ("grad_norm", "Gradient norm"), ("lr", "Learning rate")):
        pairs = [(s, _number(s.get("logged"), metric), _number(s.get("replayed"), metric)) for s in steps]
        there = [(float(s["step"]), a, b) for s, a, b in pairs if a is not None and b is not None]
        if there:
            drawn.append(
                line_chart(
                    f"{title}: logged against replayed",
                    [
                        Line("logged", [(x, a) for x, a, _ in there], "logged"),
                        Line("replayed", [(x, b) for x, _, b in there], "replayed", dots=True),
                    ],
                )
            )
    return drawn


def _number(values: Any, name: str) -> float | None:
    value = values.get(name) if isinstance(values, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def by_step(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checkpoints for a table: the newest step first, with the verdicts that hold."""
    return sorted(
        (with_shown(row) for row in rows), key=lambda r: (r["step"] is not None, r["step"] or 0), reverse=True
    )


def with_hints(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Findings for a list: the loudest first, their hints ready to be pasted."""
    order = {"error": 0, "warning": 1, "info": 2}
    told = [
        {**one, "hint": meant(one["hint"], one["target"], full_path(one["target"], one["path"]))}
        for one in items
    ]
    return sorted(told, key=lambda one: order[one["severity"]])


def usual_words(usual: Mapping[str, Any] | None) -> str:
    """A run's habits in one line; empty where too little was seen."""
    if not usual or not usual.get("bytes"):
        return ""
    words = size(usual["bytes"])
    if usual.get("seconds") is not None:
        words += f" in {duration(usual['seconds'])}"
    return words + (f", every {duration(usual['interval'])}" if usual.get("interval") else "")


def components(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(component, there | missing | not applicable), those that are there first."""
    words = {True: "there", False: "missing", None: "not applicable"}
    order = {True: 0, False: 1, None: 2}
    items = sorted((row["components"] or {}).items(), key=lambda item: order[item[1]])
    return [(name, words[there]) for name, there in items]

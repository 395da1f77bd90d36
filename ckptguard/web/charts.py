"""The pages' own drawings as inline SVG, made on the server: time line, bars, sparkline. Pure.

Colours are CSS classes, so that they follow light and dark; every mark has its words as a title, and a table beside
the drawing says the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ckptguard.report.plot import ticks

WIDTH = 900
EVIDENCE = ("listing", "structure", "content", "restored", "replayed")


def timeline(rows: Sequence[Mapping[str, Any]], risk_from: int | None, step: int | None) -> str:
    """The checkpoints of a run by step: colour says the verdict, height the evidence; what is at risk is shaded."""
    known = [row for row in rows if row["step"] is not None]
    if not known:
        return '<p class="quiet">no checkpoint with a known step yet</p>'
    height, base, unit = 150, 116, 20
    low = min(row["step"] for row in known)
    high = max([row["step"] for row in known] + ([step] if step is not None else []))
    span = max(1, high - low)

    def across(value: float) -> float:
        return float(24 + (value - low) / span * (WIDTH - 48))

    wide = max(5.0, min(18.0, (WIDTH - 48) / max(1, len(known)) * 0.6))
    parts = [
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" role="group" aria-label="Checkpoints by step">',
        f'<line class="grid" x1="0" x2="{WIDTH}" y1="{base}" y2="{base}"/>',
    ]
    if risk_from is not None and step is not None and step > risk_from:
        x = across(risk_from)
        parts.append(
            f'<rect class="at-risk" x="{x:.1f}" y="6" width="{across(step) - x:.1f}" height="{base - 6}">'
            f"<title>work at risk: steps {risk_from} to {step}</title></rect>"
        )
    for row in known:
        depth = EVIDENCE.index(row["shown_evidence"]) + 1
        tall = depth * unit
        gone = " gone" if row["gone_at"] is not None else ""
        words = (
            f"{row['path']}: {row['shown_resume']}, {row['shown_evidence']}{', rotated away' if gone else ''}"
        )
        parts.append(
            f'<a href="/checkpoints/{row["id"]}"><rect class="bar {escape(row["shown_resume"])}{gone}" '
            f'x="{across(row["step"]) - wide / 2:.1f}" y="{base - tall}" width="{wide:.1f}" height="{tall}" rx="2">'
            f"<title>{escape(words)}</title></rect></a>"
        )
    for value in sorted({round(t) for t in ticks(low, high, 8)}):
        if low <= value <= high:
            parts.append(
                f'<text class="tick" x="{across(value):.1f}" y="{base + 18}" text-anchor="middle">{value}</text>'
            )
    parts.append(f'<text class="tick" x="{WIDTH - 4}" y="{height - 2}" text-anchor="end">step</text></svg>')
    return "".join(parts)


def bars(title: str, values: Sequence[tuple[str, float]], words: Any, usual: float | None = None) -> str:
    """One bar a value, oldest first; a line where the usual is."""
    there = [(label, value) for label, value in values if value is not None]
    if not there:
        return f'<p class="quiet">{escape(title)}: nothing measured yet</p>'
    height, base, left = 150, 126, 76
    top = max([value for _, value in there] + ([usual] if usual else [])) or 1.0
    room = (WIDTH - left - 8) / len(there)

    def up(value: float) -> float:
        return base - value / top * (base - 14)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
    ]
    for value in ticks(0.0, top, 3):
        parts.append(
            f'<line class="grid" x1="{left}" x2="{WIDTH}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>'
            f'<text class="tick" x="{left - 8}" y="{up(value) + 4:.1f}" text-anchor="end">{escape(words(value))}</text>'
        )
    for place, (label, value) in enumerate(there):
        x = left + place * room
        parts.append(
            f'<rect class="bar plain" x="{x + room * 0.15:.1f}" y="{up(value):.1f}" width="{max(1.0, room * 0.7):.1f}" '
            f'height="{max(1.0, base - up(value)):.1f}"><title>{escape(label)}: {escape(words(value))}</title></rect>'
        )
    if usual:
        parts.append(
            f'<line class="usual" x1="{left}" x2="{WIDTH}" y1="{up(usual):.1f}" y2="{up(usual):.1f}">'
            f"<title>usual: {escape(words(usual))}</title></line>"
        )
    first, last = there[0][0], there[-1][0]
    parts.append(f'<text class="tick" x="{left}" y="{height - 4}">{escape(first)}</text>')
    if len(there) > 1:
        parts.append(
            f'<text class="tick" x="{WIDTH}" y="{height - 4}" text-anchor="end">{escape(last)}</text>'
        )
    return "".join([*parts, "</svg>"])


def sparkline(values: Sequence[float], title: str) -> str:
    """A small curve without axes."""
    if len(values) < 2:
        return ""
    top = max(values) or 1.0
    step = 116 / (len(values) - 1)
    points = " ".join(f"{2 + n * step:.1f},{25 - value / top * 21:.1f}" for n, value in enumerate(values))
    return (
        f'<svg class="spark" viewBox="0 0 120 28" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f'<polyline class="logged" points="{points}"/></svg>'
    )

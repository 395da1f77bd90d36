"""Line charts as inline SVG: no script, no font, no file from elsewhere. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 12, 34

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. `style` is a CSS class of the page; values that are not finite leave a gap."""

    name: str
    points: Sequence[Point]
    style: str
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """The stretch between two curves over the same x."""

    points: Sequence[tuple[float, float, float]]
    name: str = "tolerance"


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at an x: a thin upright line with its words."""

    x: float
    text: str
    style: str


def line_chart(
    title: str,
    lines: Sequence[Line],
    band: Band | None = None,
    x_name: str = "step",
    marks: Sequence[Mark] = (),
) -> str:
    """A chart of finite points; a sentence instead where there is none. Marks outside the curves are left out."""
    xs = [x for line in lines for x, y in line.points if math.isfinite(y)]
    ys = [y for line in lines for _, y in line.points if math.isfinite(y)]
    if band is not None:
        ys += [y for _, low, high in band.points for y in (low, high) if math.isfinite(y)]
    if not xs or not ys:
        return f'<p class="quiet">{escape(title)}: no finite numbers to draw</p>'
    scale = _Scale(_padded(xs, 0.02), _padded(ys, 0.08))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        *_grid(scale, xs, x_name),
    ]
    if band is not None:
        parts.append(_band(scale, band))
    parts += [_mark(scale, mark) for mark in marks if scale.x[0] <= mark.x <= scale.x[1]]
    for line in lines:
        parts += _line(scale, line)
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True, slots=True)
class _Scale:
    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, value: float) -> float:
        low, high = self.x
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def up(self, value: float) -> float:
        low, high = self.y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _padded(values: Sequence[float], share: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * share or abs(high) * 0.05 or 1.0
    return low - room, high + room


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) between two bounds."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5, 10) if m * power >= rough), 10 * power)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]


def _grid(scale: _Scale, xs: Sequence[float], x_name: str) -> list[str]:
    parts = []
    for value in ticks(*scale.y):
        y = scale.up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>'
        )
    whole = sorted({round(value) for value in ticks(min(xs), max(xs), 8)} or {round(xs[0])})
    for value in whole:
        x = scale.across(value)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{value}</text>')
    parts.append(
        f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 1}" text-anchor="end">{escape(x_name)}</text>'
    )
    return parts


def _band(scale: _Scale, band: Band) -> str:
    there = [p for p in band.points if math.isfinite(p[1]) and math.isfinite(p[2])]
    upper = [f"{scale.across(x):.1f},{scale.up(high):.1f}" for x, _, high in there]
    lower = [f"{scale.across(x):.1f},{scale.up(low):.1f}" for x, low, _ in reversed(there)]
    return f'<polygon class="band" points="{" ".join(upper + lower)}"><title>{escape(band.name)}</title></polygon>'


def _mark(scale: _Scale, mark: Mark) -> str:
    x = scale.across(mark.x)
    return (
        f'<line class="mark {mark.style}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
        f"<title>{escape(mark.text)}</title></line>"
    )


def _line(scale: _Scale, line: Line) -> list[str]:
    parts = []
    stretch: list[str] = []
    for x, y in [*line.points, (0.0, math.nan)]:
        if math.isfinite(y):
            stretch.append(f"{scale.across(x):.1f},{scale.up(y):.1f}")
        elif stretch:
            parts.append(f'<polyline class="{line.style}" points="{" ".join(stretch)}"/>')
            stretch = []
    if line.dots:
        parts += [
            f'<circle class="{line.style}" cx="{scale.across(x):.1f}" cy="{scale.up(y):.1f}" r="3.5">'
            f"<title>{escape(line.name)}, {x:g}: {y:.9g}</title></circle>"
            for x, y in line.points
            if math.isfinite(y)
        ]
    return parts

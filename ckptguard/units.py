"""Durations, sizes and times as people write and read them. Standard library only."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_BYTES = {
    "": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_duration(text: str | float) -> float:
    """Seconds of `90`, `90s`, `15m`, `6h`, `7d`, `2w`. Raises ValueError with the form that is expected."""
    return _parse(text, _SECONDS, "a duration like 90s, 15m, 6h or 7d")


def parse_size(text: str | int) -> int:
    """Bytes of `1000`, `50MB`, `4GiB`. Raises ValueError with the form that is expected."""
    return int(_parse(text, _BYTES, "a size like 500MB or 4GiB"))


def _parse(text: str | float, units: dict[str, float] | dict[str, int], expected: str) -> float:
    if isinstance(text, int | float) and not isinstance(text, bool):
        number, unit = float(text), ""
    else:
        match = _NUMBER.fullmatch(str(text))
        if match is None or match[2].lower() not in units:
            raise ValueError(f"expected {expected}, got {text!r}")
        number, unit = float(match[1]), match[2].lower()
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"expected {expected}, got {text!r}")
    return number * units[unit]


def duration(seconds: float | None) -> str:
    """`42 s`, `3 min 20 s`, `5 h 10 min`, `3 d 4 h`: two units at the most."""
    if seconds is None:
        return "unknown"
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms"
    left = round(seconds)
    parts = []
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {name}")
        elif parts:
            break
    return " ".join(parts[:2]) or "0 s"


def size(count: float | None) -> str:
    """`1.5 GB`: decimal units, three digits."""
    if count is None:
        return "unknown"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def timestamp(seconds: float | None) -> str | None:
    """ISO 8601 in UTC, to the second, of epoch seconds."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

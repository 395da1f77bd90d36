"""Finding codes that somebody silenced: with a reason, and until a day. They stay listed, and change no resume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime

from ckptguard.codes import CODES
from ckptguard.errors import UsageError


@dataclass(frozen=True, slots=True)
class Silence:
    """`until` is the last day on which it counts, in UTC."""

    code: str
    reason: str
    until: date

    def counts(self, now: float) -> bool:
        return datetime.fromtimestamp(now, UTC).date() <= self.until


def parse(text: str) -> Silence:
    """The silence in `CODE=REASON@YYYY-MM-DD`. Raises UsageError that says what is missing."""
    form = "expected CODE=REASON@YYYY-MM-DD, such as stale-pointer=moved by hand@2030-01-31"
    code, mark, rest = text.partition("=")
    reason, at, day = rest.rpartition("@")
    if not mark or not at or not reason.strip():
        raise UsageError(f"--silence {text!r}: {form}")
    if code not in CODES:
        raise UsageError(f"--silence {text!r}: {code!r} is no finding code", "docs/codes.md lists them")
    try:
        return Silence(code, reason.strip(), date.fromisoformat(day))
    except ValueError:
        raise UsageError(f"--silence {text!r}: {form}") from None


def configured(entries: Mapping[str, str]) -> tuple[Silence, ...]:
    """The silences of a configuration, REASON@YYYY-MM-DD by code. Those of anomalies say nothing of checkpoints."""
    return tuple(parse(f"{code}={entry}") for code, entry in entries.items() if code in CODES)


def in_force(silences: Iterable[Silence], now: float) -> tuple[Mapping[str, str], tuple[Silence, ...]]:
    """(reasons by code of those that count, those that have expired)."""
    every = tuple(silences)
    reasons = {s.code: f"{s.reason}, until {s.until}" for s in every if s.counts(now)}
    return reasons, tuple(s for s in every if not s.counts(now))

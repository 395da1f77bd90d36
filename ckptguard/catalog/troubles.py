"""Pure: from troubles to what is said of them. On a change of state, not on every look."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from ckptguard.model import Severity

CROWD = 3
"""More checkpoints of a run than this with the same trouble are one alert."""
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that is wrong now. `key` is the same for the same trouble, `absorbs` the keys that it speaks for too."""

    key: str
    run: str
    run_id: int
    code: str
    severity: Severity
    title: str
    message: str
    hint: str
    since: float
    checkpoint: str | None = None
    checkpoint_id: int | None = None
    absorbs: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class Standing:
    """An alert that fires: as the catalog remembers it."""

    id: int
    key: str
    code: str
    severity: Severity
    first_seen: float
    said_at: float


class Act(StrEnum):
    """What is to be done about an alert. ABSORB ends it without a word: another one speaks for it now."""

    FIRE = "fire"
    CHANGE = "change"
    REMIND = "remind"
    RESOLVE = "resolve"
    ABSORB = "absorb"


@dataclass(frozen=True, slots=True)
class Decision:
    act: Act
    trouble: Trouble | None
    standing: Standing | None


def crowd(troubles: Iterable[Trouble]) -> list[Trouble]:
    """The troubles with those of many checkpoints put together: a failing disk is one alert, not a hundred."""
    groups: dict[tuple[int, str], list[Trouble]] = defaultdict(list)
    result: list[Trouble] = []
    for trouble in troubles:
        if trouble.checkpoint is None:
            result.append(trouble)
        else:
            groups[(trouble.run_id, trouble.code)].append(trouble)
    for (_, code), members in groups.items():
        if len(members) <= CROWD:
            result.extend(members)
            continue
        newest = members[-1]
        result.append(
            replace(
                newest,
                key=f"{newest.run}:{code}",
                severity=max(members, key=lambda m: m.severity.rank).severity,
                title=f"{code}: {len(members)} checkpoints of {newest.run}",
                message=f"{len(members)} checkpoints, among them {newest.checkpoint}: {newest.message}",
                since=min(m.since for m in members),
                checkpoint=None,
                checkpoint_id=None,
                absorbs=frozenset(m.key for m in members),
            )
        )
    return result


def decide(
    troubles: Sequence[Trouble], standing: Sequence[Standing], now: float, remind_every: float
) -> list[Decision]:
    """What changed. A trouble that got louder, or turned into another code, is said again under its key.

    Both are of the same run: what stands and is not among the troubles any more counts as healed.
    """
    now_wrong = {t.key: t for t in troubles}
    absorbed = {key for t in troubles for key in t.absorbs}
    known = {s.key: s for s in standing}
    decisions: list[Decision] = []
    for key, trouble in now_wrong.items():
        before = known.get(key)
        if before is None:
            decisions.append(Decision(Act.FIRE, trouble, None))
        elif trouble.severity > before.severity or trouble.code != before.code:
            decisions.append(Decision(Act.CHANGE, trouble, before))
        elif now - before.said_at >= remind_every:
            decisions.append(Decision(Act.REMIND, trouble, before))
    for key, before in known.items():
        if key in now_wrong:
            continue
        decisions.append(Decision(Act.ABSORB if key in absorbed else Act.RESOLVE, None, before))
    return decisions


def routed(
    severity: Severity, code: str, names: Sequence[str], *, least: Severity, runs: Sequence[str], codes: Sequence[str]
) -> bool:  # fmt: skip
    """Whether an alert goes to a sink. `names`: what the run is called, any of which may match."""
    return (
        severity >= least
        and any(fnmatchcase(name, pattern) for name in names for pattern in runs)
        and any(fnmatchcase(code, pattern) for pattern in codes)
    )


def backoff(tries: int, *, first: float = 2.0, most: float = 600.0) -> float:
    """Seconds until the next try of a delivery that failed so many times."""
    return min(most, first * 2.0 ** min(tries, 20))


def document(
    trouble: Trouble,
    *,
    state: str,
    first_seen: str | None,
    work_at_risk: Mapping[str, Any] | None,
    url: str | None,
) -> dict[str, Any]:
    """The alert as every sink gets it: the contract's fields."""
    return {
        "schema": SCHEMA,
        "key": trouble.key,
        "state": state,
        "severity": str(trouble.severity),
        "run": trouble.run,
        "checkpoint": trouble.checkpoint,
        "code": trouble.code,
        "title": trouble.title,
        "message": trouble.message,
        "hint": trouble.hint,
        "first_seen": first_seen,
        "work_at_risk": dict(work_at_risk) if work_at_risk is not None else None,
        "url": url,
    }

"""What of a run may be deleted. Pure: verdicts, pointers, the log and the clock in, a plan out.

Only checkpoints that are proven safe count for what is to be kept. Never planned for deletion: the newest safe one, one
that a pointer or a running job names, one that is unsafe or unknown (it may be all that is left, and it is evidence), one
that is being written or was changed a moment ago; and with a replica in view, one that is not proven there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckptguard.errors import UsageError
from ckptguard.judge import newest_first, newest_safe
from ckptguard.model import LogRow, Resume, Verdict


@dataclass(frozen=True, slots=True)
class Policy:
    """What to keep. `best` names a metric of the log, `METRIC` (the lowest is best) or `METRIC:max`."""

    last: int | None = None
    every: int | None = None
    best: str | None = None

    def __post_init__(self) -> None:
        if self.last is None and self.every is None and self.best is None:
            raise UsageError("say what to keep", "--keep-last 3, --keep-every 1000, --keep-best eval_loss")
        if self.last is not None and self.last < 1:
            raise UsageError(
                f"--keep-last {self.last}: at least the newest safe checkpoint is kept", "--keep-last 1"
            )
        if self.every is not None and self.every < 1:
            raise UsageError(f"--keep-every {self.every}: expected a number of steps", "--keep-every 1000")


@dataclass(frozen=True, slots=True)
class Protection:
    """What must not be deleted whatever the policy says: checkpoints by path, with the reason.

    `unproven`: those that the replica does not hold, proven; empty, and `replica` None, where none is in view.
    """

    named: Mapping[str, str] = field(default_factory=dict)
    replica: str | None = None
    proven: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Decided:
    """One checkpoint: kept or deleted, and why."""

    path: str
    step: int | None
    resume: Resume
    bytes: int
    delete: bool
    why: tuple[str, ...]


def plan_prune(
    verdicts: Sequence[Verdict],
    policy: Policy,
    protection: Protection,
    log: Sequence[LogRow],
    now: float,
    grace: float,
) -> tuple[Decided, ...]:
    """Decide on every checkpoint, oldest first. Raises UsageError for a metric that the log does not have."""
    safe = [v for v in newest_first(verdicts) if v.resume.safe]
    newest = newest_safe(verdicts)
    reasons: dict[str, list[str]] = {v.path: [] for v in verdicts}
    if newest is not None:
        reasons[newest.path].append("the newest safe one")
    for verdict in safe[: policy.last or 0]:
        reasons[verdict.path].append(f"of the last {policy.last} safe ones")
    for verdict in safe:
        if policy.every is not None and verdict.step is not None and verdict.step % policy.every == 0:
            reasons[verdict.path].append(f"a multiple of {policy.every} steps")
    if policy.best is not None:
        best, words = best_by(policy.best, safe, log)
        reasons[best.path].append(words)
    for verdict in verdicts:
        reasons[verdict.path] += _protected(verdict, protection, now, grace)
    order = sorted(verdicts, key=lambda v: (v.step is not None, v.step or 0, v.attempt or 0, v.modified))
    return tuple(
        Decided(
            v.path,
            v.step,
            v.resume,
            v.bytes,
            not reasons[v.path],
            tuple(reasons[v.path]) or ("no rule keeps it",),
        )
        for v in order
    )


def _protected(verdict: Verdict, protection: Protection, now: float, grace: float) -> list[str]:
    found = []
    if not verdict.resume.safe:
        found.append(f"{verdict.resume}: only proven safe ones are deleted")
    if now - verdict.modified < grace:
        found.append("changed a moment ago")
    if verdict.path in protection.named:
        found.append(protection.named[verdict.path])
    if protection.replica is not None and verdict.path not in protection.proven:
        found.append(f"not proven on {protection.replica}")
    return found


def best_by(metric: str, safe: Sequence[Verdict], log: Sequence[LogRow]) -> tuple[Verdict, str]:
    """The safe checkpoint whose metric is best, and the words for it. Raises UsageError when none has the metric."""
    name, _, direction = metric.partition(":")
    if direction not in ("", "min", "max"):
        raise UsageError(
            f"--keep-best {metric}: expected METRIC, METRIC:min or METRIC:max", "--keep-best eval_loss"
        )
    values = {row.step: value for row in log if (value := _value(row, name)) is not None}
    scored = [(values[v.step], v) for v in safe if v.step in values]
    if not scored:
        raise UsageError(
            f"--keep-best {name}: the run's log has no such value at the step of any safe checkpoint",
            "name a metric of the log, like eval_loss or eval_accuracy:max",
        )
    value, best = (max if direction == "max" else min)(scored, key=lambda pair: pair[0])
    return best, f"the best {name} ({value:g})"


def _value(row: LogRow, name: str) -> float | None:
    value = getattr(row, name) if name in ("loss", "grad_norm", "lr") else row.extra.get(name)
    number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    return float(value) if number else None  # type: ignore[arg-type]

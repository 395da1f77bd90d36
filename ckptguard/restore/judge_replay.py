"""Judges the replayed steps, and the whole state at their end. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckptguard.codes import finding
from ckptguard.model import Effect, Severity
from ckptguard.restore.compare import COMPUTED, compare_steps, distance
from ckptguard.restore.logbook import Precision
from ckptguard.restore.model import ComparedStep, Noise, Trial
from ckptguard.restore.recorded import SILENT, Notes, Recorded
from ckptguard.restore.words import describe_differences, number

LEAST_STEPS = 2
"""The first step's loss comes before any update: it is equal for every optimizer or schedule fault."""
CALIBRATE = "restore on the machine that wrote it, or keep another checkpoint of the run to calibrate on"


def judge_replay(
    notes: Notes, recorded: Recorded, trials: Sequence[Trial], noise: Noise
) -> tuple[ComparedStep, ...]:
    trial = trials[0]
    steps = compare_steps(recorded.rows, trial.steps, noise, Precision(recorded.column or recorded.rows))
    if not steps:
        why = "no log of the steps after it" if not recorded.rows else "nothing was replayed that the log has"
        notes.missing("replay", why)
        return ()
    notes.checks += 1
    notes.exact &= all(step.exact for step in steps)
    wrong = [step for step in steps if not step.ok]
    covered = sum(step.span for step in steps if "loss" in step.logged)
    if not wrong:
        if covered >= LEAST_STEPS:
            notes.proven = True
        else:
            notes.missing("replay", f"{covered} step with a loss is too few: an update must be among them")
        return steps
    decided = noise.gap is not None or any(
        metric not in COMPUTED for step in wrong for metric in _beyond(step)
    )
    message = _tell(steps, wrong)
    if decided:
        notes.diverged = True
        notes.findings.append(finding("replay-divergence", f"step {wrong[0].step}", message))
    elif notes.failed:
        # The state is another one already: that the steps differ is its consequence, whatever the environment adds.
        notes.findings.append(
            finding(
                "replay-divergence",
                f"step {wrong[0].step}",
                message,
                severity=Severity.WARNING,
                effect=Effect.UNKNOWN,
            )
        )
    else:
        notes.undecided = True
        notes.findings.append(
            finding(
                "replay-divergence",
                f"step {wrong[0].step}",
                f"{message}. Not decided: it is not known how far this environment is from the one that wrote the "
                f"log ({_no_gap(recorded)})",
                CALIBRATE,
                severity=Severity.WARNING,
                effect=Effect.UNKNOWN,
            )
        )
    return steps


def _beyond(step: ComparedStep) -> list[str]:
    return [m for m in step.logged if distance(step.logged[m], step.replayed[m]) > step.tolerance[m]]


def _tell(steps: Sequence[ComparedStep], wrong: Sequence[ComparedStep]) -> str:
    first = wrong[0]
    parts = [
        f"{metric} {number(first.replayed[metric])} replayed, {number(first.logged[metric])} logged "
        f"(tolerance {number(first.tolerance[metric])})"
        for metric in _beyond(first)
    ]
    share = f"{len(wrong)} of {len(steps)} compared steps differ, the first at step {first.step}: "
    return share + "; ".join(parts)


def judge_against(
    notes: Notes, recorded: Recorded, trials: Sequence[Trial], noise: Noise, steps: Sequence[ComparedStep]
) -> None:
    """Compare the whole state at the later checkpoint; `steps` are the compared rows of the log."""
    trial = trials[0]
    if recorded.against is None or trial.against_compared is None:
        return
    notes.checks += 1
    wrong = [d for d in trial.against if d.kind not in SILENT]
    if not wrong:
        notes.proven = True
        return
    notes.exact = False
    ends = {t.end for t in trials}
    names = sorted({d.component for d in wrong})
    message = (
        f"the state after replaying up to {recorded.against} differs from what it holds in {len(wrong)} of "
        f"{trial.against_compared} values ({', '.join(names)}); "
        + describe_differences(wrong[0].component, wrong[0].kind, [wrong[0]])
    )
    if notes.failed or notes.diverged:
        return  # a state or a step that differs makes all that follow differ
    beyond = [
        s for s in steps if recorded.until is not None and s.step > recorded.until and "loss" in s.logged
    ]
    if beyond and all(step.exact for step in steps):
        # What is computed from the replayed state is what was logged: the state is right, and the other file is not.
        notes.findings.append(
            finding(
                "replay-divergence",
                recorded.against,
                f"{message}. The log agrees exactly, also after it: it is {recorded.against} that holds other state",
                f"look at that one: ckptguard audit {recorded.against}",
                severity=Severity.WARNING,
                effect=Effect.NONE,
            )
        )
        return
    no_gap = noise.gap is not None and not any(any(curve) for curve in noise.gap.values())
    repeats = len(trials) > 1 and len(ends) == 1
    if no_gap and repeats:
        notes.diverged = True
        notes.findings.append(finding("replay-divergence", recorded.against, message))
    elif notes.proven:
        # The log was matched within what can be repeated here: equality of bits is not to be had.
        notes.missing("against", "restores do not repeat bit for bit on this device and in this environment")
    else:
        notes.undecided = True
        why = (
            "restores do not repeat bit for bit on this device"
            if len(ends) > 1
            else f"it is not known how far this environment is from the one that wrote it ({_no_gap(recorded)})"
        )
        notes.findings.append(
            finding(
                "replay-divergence",
                recorded.against,
                f"{message}. Not decided: {why}",
                CALIBRATE,
                severity=Severity.WARNING,
                effect=Effect.UNKNOWN,
            )
        )


def _no_gap(recorded: Recorded) -> str:
    return recorded.no_gap or "no other checkpoint of this run could be replayed to measure it"

"""Decides what a restore proved: records and trials in, findings and a result out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckptguard.codes import finding
from ckptguard.model import Effect, Evidence, Finding, LogRow, NotRun, Severity
from ckptguard.restore.compare import (
    COMPUTED,
    FACTOR,
    SINGLE,
    Curve,
    compare_batches,
    compare_steps,
    distance,
    same_environment,
    spread,
)
from ckptguard.restore.logbook import Precision
from ckptguard.restore.model import METRICS, ComparedStep, Difference, Noise, RestoreReport, Trial
from ckptguard.restore.words import describe_differences, number

LEAST_STEPS = 2
"""The first step's loss comes before any update: it is equal for every optimizer or schedule fault."""
CALIBRATE = "restore on the machine that wrote it, or keep another checkpoint of the run to calibrate on"
SILENT = frozenset({"added", "unused"})
"""Differences that do not make the restored state another one."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is known of the checkpoint and of the training that went on from it.

    `rows` are the log's after the checkpoint; `column` all of them, for how finely they were written. `draws` are the
    recorded next draws of each RNG stream; `gaps` what the framework never saves. `gap` is the measured distance of the
    environments, on the checkpoint `calibrated_on`; `no_gap` says why there is none.
    """

    checkpoint: str
    step: int | None = None
    layout: str = ""
    rows: tuple[LogRow, ...] = ()
    column: tuple[LogRow, ...] = ()
    draws: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    probe: float | None = None
    environment: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    gaps: tuple[str, ...] = ()
    against: str | None = None
    gap: Mapping[str, tuple[float, ...]] | None = None
    calibrated_on: str | None = None
    no_gap: str = ""
    not_run: tuple[NotRun, ...] = ()


@dataclass(slots=True)
class _Notes:
    """What the stages add up to, in the order of the contract."""

    findings: list[Finding] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    checks: int = 0
    failed: bool = False
    diverged: bool = False
    undecided: bool = False
    proven: bool = False
    exact: bool = True

    def missing(self, check: str, why: str) -> None:
        self.not_run.append(NotRun(check, why))


def needs_calibration(recorded: Recorded, trials: Sequence[Trial]) -> bool:
    """Whether the result hangs on how far this environment is from the one that wrote the log."""
    notes, noise = _Notes(), _noise(recorded, trials)
    if noise.gap is not None or any(trial.fault for trial in trials):
        return False
    _state(notes, recorded, trials[0])
    _streams(notes, recorded, trials[0])
    if notes.failed:
        return False
    _replay(notes, recorded, trials, noise)
    _against(notes, recorded, trials, noise)
    return notes.undecided and not notes.diverged


def conclude(recorded: Recorded, trials: Sequence[Trial], seconds: float = 0.0) -> RestoreReport:
    """What is said of the restore. `trials` are repeats of the same order, the first one leading."""
    first = trials[0]
    noise = _noise(recorded, trials)
    notes = _Notes(not_run=[*recorded.not_run, *first.not_run])
    steps: tuple[ComparedStep, ...] = ()
    evidence = Evidence.RESTORED
    fault = next((trial.fault for trial in trials if trial.fault), None)
    if fault is not None:
        notes.checks += 1
        notes.failed, notes.exact = True, False
        notes.findings.append(finding("restore-failed", recorded.checkpoint, fault.message, fault.hint))
    else:
        notes.checks += 1
        _state(notes, recorded, first)
        _streams(notes, recorded, first)
        _batches(notes, recorded, first)
        _probe(notes, recorded, trials)
        steps = _replay(notes, recorded, trials, noise)
        _against(notes, recorded, trials, noise)
        if steps or first.against_compared:
            evidence = Evidence.REPLAYED
    result = _result(notes)
    return RestoreReport(
        checkpoint=recorded.checkpoint,
        result=result,
        evidence=evidence,
        bitwise=result == "continuous" and notes.exact,
        device=first.device,
        steps=steps,
        noise=noise,
        findings=tuple(notes.findings),
        not_run=tuple(notes.not_run),
        checks=notes.checks,
        step=recorded.step,
        layout=recorded.layout,
        against=recorded.against,
        compared=(first.compared or 0) + (first.against_compared or 0),
        environment=first.environment,
        recorded_environment=recorded.environment,
        seconds=seconds,
    )


def _result(notes: _Notes) -> str:
    if notes.failed:
        return "failed"
    if notes.diverged:
        return "diverged"
    if notes.undecided or not notes.proven:
        return "unproven"
    return "continuous"


def _noise(recorded: Recorded, trials: Sequence[Trial]) -> Noise:
    same = same_environment(recorded.environment, trials[0].environment) if trials else None
    gap: Mapping[str, Curve] | None = dict.fromkeys(METRICS, ()) if same else recorded.gap
    return Noise(
        len(trials), spread(trials) if len(trials) > 1 else {}, gap, None if same else recorded.calibrated_on
    )


_TOGETHER = (
    "the Trainer loads optimizer.pt and scheduler.pt only where both are there, and says nothing: put the missing one "
    "back, or resume from another checkpoint (ckptguard preflight RUN names it)"
)

# --- the state --------------------------------------------------------------------------------------------


def _state(notes: _Notes, recorded: Recorded, trial: Trial) -> None:
    if trial.compared is None:
        return
    notes.checks += 1
    groups: dict[tuple[str, str], list[Difference]] = {}
    for difference in trial.state:
        groups.setdefault((difference.component, difference.kind), []).append(difference)
    pair = {"optimizer", "scheduler"}
    for (component, kind), members in groups.items():
        subject = members[0].subject if len(members) == 1 else members[0].subject.partition(":")[0]
        message = describe_differences(component, kind, members)
        if kind in SILENT:
            lost = kind == "unused" and component in (
                "model",
                "optimizer",
                "scheduler",
                "scaler",
                "dataloader",
            )
            severity = Severity.WARNING if lost else Severity.INFO
            notes.findings.append(
                finding("state-mismatch", subject, message, severity=severity, effect=Effect.NONE)
            )
            continue
        notes.failed, notes.exact = True, False
        if kind == "absent":
            notes.findings.append(
                finding("state-mismatch", subject, message, severity=Severity.WARNING, effect=Effect.LOSSY)
            )
        else:
            notes.findings.append(finding("state-mismatch", subject, message))


# --- random numbers ---------------------------------------------------------------------------------------


def _streams(notes: _Notes, recorded: Recorded, trial: Trial) -> None:
    if trial.rng_restored is None:
        return
    wrong = {
        stream: (want, trial.draws[stream])
        for stream, want in recorded.draws.items()
        if stream in trial.draws and tuple(want) != tuple(trial.draws[stream])
    }
    compared = recorded.draws.keys() & trial.draws.keys()
    if compared:
        notes.checks += 1
    for stream, (want, got) in sorted(wrong.items()):
        notes.failed, notes.exact = True, False
        notes.findings.append(
            finding(
                "rng-stream-mismatch",
                f"{recorded.checkpoint}:{stream}",
                f"the {stream} generator would draw {', '.join(got[:2])}; recorded at the save: {', '.join(want[:2])}",
            )
        )
    if not trial.rng_restored and not wrong:
        message = "the checkpoint holds no state of the random generators: they start anew"
        if "rng" in recorded.gaps:
            notes.missing("rng", f"{recorded.layout} never saves it")
        else:
            notes.findings.append(
                finding(
                    "rng-stream-mismatch",
                    recorded.checkpoint,
                    message,
                    severity=Severity.WARNING,
                    effect=Effect.LOSSY,
                )
            )
    elif not compared:
        notes.missing("rng-draws", "no draws were recorded at the save; use the Recorder")


# --- data and probe -----------------------------------------------------------------------------------------


def _batches(notes: _Notes, recorded: Recorded, trial: Trial) -> None:
    compared, wrong = compare_batches(recorded.rows, trial.steps)
    if not compared:
        why = "replayed on recorded batches" if trial.fixed_batches else "no batch fingerprints on both sides"
        notes.missing("batches", why)
        return
    notes.checks += 1
    if wrong:
        step, want, got = wrong[0]
        notes.diverged, notes.exact = True, False
        notes.findings.append(
            finding(
                "batch-mismatch",
                f"step {step}",
                f"{len(wrong)} of {compared} batches are not the recorded ones; the first at step {step}: "
                f"expected {want}, found {got}{_shifted(recorded.rows, trial)}",
            )
        )


def _shifted(rows: Sequence[LogRow], trial: Trial) -> str:
    """Where the replayed batches do occur in the record, if they are merely shifted."""
    where = {row.extra.get("batch"): row.step for row in rows if isinstance(row.extra.get("batch"), str)}
    shifts = {where[n.batch] - n.step for n in trial.steps if n.batch in where}
    if len(shifts) == 1 and (shift := shifts.pop()):
        return f"; the data is {abs(shift)} step{'s' * (abs(shift) > 1)} {'ahead' if shift > 0 else 'behind'}"
    return ""


def _probe(notes: _Notes, recorded: Recorded, trials: Sequence[Trial]) -> None:
    got = trials[0].probe
    if recorded.probe is None or got is None:
        lacking = "the recipe has no probe()" if got is None else "no probe was recorded at the save"
        notes.missing("probe", lacking)
        return
    notes.checks += 1
    values = [trial.probe for trial in trials if trial.probe is not None]
    noise = max(values) - min(values)
    off = distance(recorded.probe, got)
    if not off:
        return
    notes.exact = False
    same = same_environment(recorded.environment, trials[0].environment)
    if off > FACTOR * noise and same:
        notes.diverged = True
        notes.findings.append(
            finding(
                "probe-mismatch",
                recorded.checkpoint,
                f"loss on the fixed batch: expected {number(recorded.probe)}, found {number(got)} "
                f"(difference {number(off)}, noise {number(noise)})",
            )
        )
    elif off > FACTOR * noise:
        # Single precision over a model's depth; more than that is decided by the replay.
        if off > 1000 * SINGLE * abs(recorded.probe):
            notes.undecided = True
        notes.missing("probe", f"differs by {number(off)}, and the gap between the environments is not known")


# --- the replay ---------------------------------------------------------------------------------------------


def _replay(
    notes: _Notes, recorded: Recorded, trials: Sequence[Trial], noise: Noise
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


def _against(notes: _Notes, recorded: Recorded, trials: Sequence[Trial], noise: Noise) -> None:
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

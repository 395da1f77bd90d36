"""Decides what a restore proved: records and trials in, findings and a result out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptguard.codes import CODES, finding
from ckptguard.model import Evidence, Finding
from ckptguard.restore.compare import Curve, is_close, same_environment, spread
from ckptguard.restore.judge_replay import judge_against, judge_replay
from ckptguard.restore.judge_state import judge_batches, judge_probe, judge_state, judge_streams
from ckptguard.restore.model import METRICS, ComparedStep, Noise, RestoreReport, Trial
from ckptguard.restore.recorded import Notes, Recorded
from ckptguard.restore.words import next_step


def needs_calibration(recorded: Recorded, trials: Sequence[Trial]) -> bool:
    """Whether the result hangs on how far this environment is from the one that wrote the log."""
    notes, noise = Notes(), _noise(recorded, trials)
    if noise.gap is not None or any(trial.fault for trial in trials):
        return False
    judge_state(notes, recorded, trials[0])
    judge_streams(notes, recorded, trials[0])
    if notes.failed:
        return False
    steps = judge_replay(notes, recorded, trials, noise)
    judge_against(notes, recorded, trials, noise, steps)
    return notes.undecided and not notes.diverged


def needs_repeats(recorded: Recorded, trials: Sequence[Trial]) -> bool:
    """Whether the steps differ by so little that two repeats may have missed the device's noise."""
    if any(trial.fault for trial in trials):
        return False
    notes = Notes()
    steps = judge_replay(notes, recorded, trials, _noise(recorded, trials))
    wrong = [step for step in steps if not step.ok]
    return bool(wrong) and all(map(is_close, wrong))


def conclude(recorded: Recorded, trials: Sequence[Trial], seconds: float = 0.0) -> RestoreReport:
    """What is said of the restore. `trials` are repeats of the same order, the first one leading."""
    first = trials[0]
    noise = _noise(recorded, trials)
    notes = Notes(not_run=[*recorded.not_run, *first.not_run])
    steps: tuple[ComparedStep, ...] = ()
    evidence = Evidence.RESTORED
    fault = next((trial.fault for trial in trials if trial.fault), None)
    if fault is not None:
        notes.checks += 1
        notes.failed, notes.exact = True, False
        notes.findings.append(finding("restore-failed", recorded.checkpoint, fault.message, fault.hint))
    else:
        notes.checks += 1
        judge_state(notes, recorded, first)
        judge_streams(notes, recorded, first)
        judge_batches(notes, recorded, first)
        judge_probe(notes, recorded, trials)
        steps = judge_replay(notes, recorded, trials, noise)
        judge_against(notes, recorded, trials, noise, steps)
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
        findings=tuple(_with_next_step(one, recorded.checkpoint) for one in notes.findings),
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


def _with_next_step(one: Finding, checkpoint: str) -> Finding:
    """The finding with what to do about it here, unless its stage knew better than the code's usual hint."""
    return replace(one, hint=next_step(one.code, checkpoint)) if one.hint == CODES[one.code].todo else one


def _result(notes: Notes) -> str:
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

"""Judges what was restored: state, random generators, batches, probe. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckptguard.codes import finding
from ckptguard.model import Effect, LogRow, Severity
from ckptguard.restore.compare import FACTOR, SINGLE, compare_batches, distance, same_environment
from ckptguard.restore.model import Difference, Trial
from ckptguard.restore.recorded import SILENT, Notes, Recorded, left_out
from ckptguard.restore.words import describe_differences, number

_PAIR = frozenset({"optimizer", "scheduler"})
_TOGETHER = (
    "the Trainer loads optimizer.pt and scheduler.pt only where both are there, and says nothing: put the missing one "
    "back, or resume from another checkpoint (ckptguard preflight RUN names it)"
)


def judge_state(notes: Notes, recorded: Recorded, trial: Trial) -> None:
    if trial.compared is None:
        return
    notes.checks += 1
    groups: dict[tuple[str, str], list[Difference]] = {}
    for difference in trial.state:
        groups.setdefault((difference.component, difference.kind), []).append(difference)
    absent = {component for component, kind in groups if kind == "absent"}
    together = recorded.layout == "hf-trainer" and len(absent & _PAIR) == 1
    for (component, kind), members in groups.items():
        subject = members[0].subject if len(members) == 1 else members[0].subject.partition(":")[0]
        message = describe_differences(component, kind, members)
        if kind in SILENT:
            severity = Severity.WARNING if left_out(members) else Severity.INFO
            notes.findings.append(
                finding("state-mismatch", subject, message, severity=severity, effect=Effect.NONE)
            )
            continue
        notes.failed, notes.exact = True, False
        hint = _TOGETHER if together and component in _PAIR else ""
        if kind == "absent":
            notes.findings.append(
                finding(
                    "state-mismatch", subject, message, hint, severity=Severity.WARNING, effect=Effect.LOSSY
                )
            )
        else:
            notes.findings.append(finding("state-mismatch", subject, message, hint))


# --- random numbers ---------------------------------------------------------------------------------------


def judge_streams(notes: Notes, recorded: Recorded, trial: Trial) -> None:
    if trial.rng_restored is None:
        return
    if "rng" in recorded.gaps and not trial.rng_restored:
        notes.missing(
            "rng", f"{recorded.layout} never saves the random generators; each repeat had another seed"
        )
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


def judge_batches(notes: Notes, recorded: Recorded, trial: Trial) -> None:
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


def judge_probe(notes: Notes, recorded: Recorded, trials: Sequence[Trial]) -> None:
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

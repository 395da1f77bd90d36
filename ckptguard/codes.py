"""The finding codes of the contract: scope, usual severity and effect, meaning, and what a reader should do.

Codes are never renamed. Checks make findings with `finding()`, which takes the usual severity and effect from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptguard.model import Effect, Finding, Severity


@dataclass(frozen=True, slots=True)
class Code:
    """`scope`: C checkpoint, R run, S store or replica."""

    name: str
    scope: str
    severity: Severity
    effect: Effect
    meaning: str
    todo: str


def _table(text: str) -> dict[str, Code]:
    codes = {}
    for line in text.strip().splitlines():
        names, scope, severity, effect, meaning, todo = (part.strip() for part in line.split("|"))
        for name in names.split(","):
            codes[name.strip()] = Code(name.strip(), scope, Severity(severity), Effect(effect), meaning, todo)
    return codes


FALL_BACK = "resume from an older checkpoint: ckptguard preflight RUN names it"
RESTORE_FILE = "copy the file again from a replica or backup, then audit again; else " + FALL_BACK
LOOK_AGAIN = "remove the cause and audit again; until then the checkpoint counts as not resumable"

CODES: dict[str, Code] = _table(f"""
incomplete-save | C | error | unsafe | the save never finished: temporary name, no completion mark, metadata not written | {FALL_BACK}
debris | R | info | none | left-overs of a save or a rotation that are no checkpoint | delete them when the training is not running
missing-file | C | error | unsafe | an index, manifest or metadata names a file that is not there | {RESTORE_FILE}
missing-rank | C | error | unsafe | the shard of a rank is absent | copy it from the node that wrote it; else {FALL_BACK}
empty-file | C | error | unsafe | a file of zero bytes where data belongs | {RESTORE_FILE}
truncated | C | error | unsafe | a file ends before its own structure says it should | {RESTORE_FILE}
size-mismatch | C | error | unsafe | a size differs from what is recorded of it | {RESTORE_FILE}
crc-mismatch | C | error | unsafe | the container's own checksum does not match the bytes | {RESTORE_FILE}
digest-mismatch | C | error | unsafe | bytes differ from the sealed or recorded digest | ckptguard repair CHECKPOINT --from REPLICA, where there is one; else {FALL_BACK}
bad-header | C | error | unsafe | a header, index, pickle or JSON cannot be parsed | {RESTORE_FILE}
out-of-bounds | C | error | unsafe | metadata points outside the file | {RESTORE_FILE}
unverifiable | C | info | none | bytes that nothing can prove: no checksum, no seal | seal right after saving: ckptguard seal CHECKPOINT
missing-tensor | C | error | unsafe | an index, the config or the optimizer refers to a tensor that is not there | {FALL_BACK}
unindexed-tensor | C | warning | none | a tensor, or bytes, that no index refers to | make sure that no file of another save lies here
duplicate-tensor | C | error | unsafe | the same tensor is stored twice with different bytes | {FALL_BACK}
shape-mismatch, dtype-mismatch | C | error | unsafe | shapes or dtypes disagree | {FALL_BACK}
mixed-saves | C | error | unsafe | one directory holds files of two saves | {FALL_BACK}
unsafe-pickle | C | error | unsafe | the pickle would run code that no checkpoint needs | do not load it; find out who wrote it
opaque-class | C | info | none | the pickle names classes of the user's or a framework's that were not built | nothing; loading it needs those classes to be importable
nonfinite-weights, nonfinite-optimizer | C | error | unsafe | NaN or Inf where it must not be | resume from before the values went bad: ckptguard preflight RUN
invalid-optimizer | C | error | unsafe | optimizer state that its own update rule cannot produce | {FALL_BACK}
zero-weights | C | error | unsafe | a weight matrix, or much of one, all zero though its kind never is | {FALL_BACK}
frozen-weights | C | warning | lossy | weights bitwise equal to the previous checkpoint's though steps passed | find out whether the optimizer still holds the model's parameters
weight-jump | C | warning | none | a norm or update ratio far outside this run's own history | look at the loss around the step before resuming
names-changed | C | warning | lossy | key names differ between neighbours of a run, shapes do not | strip the wrapper's prefix, or load with the same wrapper
missing-model | C | error | unsafe | no weights at all | {FALL_BACK}
missing-optimizer, missing-scheduler, missing-rng, missing-scaler, missing-dataloader, missing-config | C | warning | lossy | a component that this layout normally carries is absent | {FALL_BACK}
missing-trainer-state | C | warning | lossy | the file with the trainer's own progress is absent | {FALL_BACK}
step-mismatch, lr-mismatch, data-position-mismatch, scaler-mismatch, rng-mismatch | C | warning | lossy | components, name and log disagree | {FALL_BACK}
topology-mismatch | C | error | unsafe | the recorded topology and the files disagree | {FALL_BACK}
launch-mismatch | C | warning | lossy | the planned launch cannot take this checkpoint, or would lose state | change the launch plan, or convert the checkpoint first
config-mismatch | C | error | unsafe | the config does not fit the weights, or differs within the run | put the right config.json back
tokenizer-mismatch | C | warning | lossy | the tokenizer does not fit the weights, or differs within the run | put the right tokenizer back
rank-divergence | C | error | unsafe | replicated state differs between ranks | {FALL_BACK}
ema-mismatch | C | warning | lossy | EMA weights absent, stale, or equal to the raw ones when they should not be | rebuild the average, or {FALL_BACK}
duplicate-checkpoint, foreign-checkpoint | R | warning | none | two checkpoints of one series claim the same step with different content; a checkpoint of another run lies here | move the one that does not belong away
stale-pointer | R | warning | none | the latest pointer names an older checkpoint than the newest complete one | resume by ckptguard preflight RUN, or correct the pointer
dangling-pointer, pointer-to-unsafe, early-pointer | R | error | none | the latest pointer names nothing, an unsafe checkpoint, or one that is not complete | resume by ckptguard preflight RUN, or correct the pointer
upload-incomplete, replica-mismatch, orphaned-multipart, upload-lag | S | warning | none | the copy is partial, differs, was never completed, is late | ckptguard replicate CHECKPOINT DESTINATION
retention-risk, low-space, no-safe-checkpoint | R | error | none | the only safe checkpoint is about to go; the next saves will not fit; there is no safe checkpoint | copy the newest safe one elsewhere; make room
missed-save, stalled-save, slow-save, odd-size | R | warning | none | a save departs from this run's own rhythm | look at the training process and its storage
restore-failed, state-mismatch, probe-mismatch, batch-mismatch, rng-stream-mismatch, replay-divergence | C | error | unsafe | real objects refused the state, hold other state than the checkpoint, or do not continue the training that was recorded | ckptguard restore CHECKPOINT --recipe FILE.py:NAME --html PAGE.html shows where it departs
loss-discontinuity | R | warning | none | the logged loss jumps at a resume | ckptguard restore CHECKPOINT --recipe FILE.py:NAME --html PAGE.html shows where it departs
unstable-read | S | error | unknown | two reads of the same bytes, past the cache, differ: storage or machine is suspect | test the disk and the memory of this machine; {LOOK_AGAIN}
changed-while-read | C | info | unknown | it was replaced during the look, and again when looked at anew | audit again when the save is done
unreadable, check-failed | C | error | unknown | a file could not be read; a check of ours crashed | {LOOK_AGAIN}
unknown-layout | R | info | none | nothing here is recognised as a checkpoint | name the directory that holds the checkpoints
""")


def finding(
    code: str,
    subject: str,
    message: str,
    hint: str = "",
    *,
    severity: Severity | None = None,
    effect: Effect | None = None,
) -> Finding:
    """A finding with the code's usual severity, effect and hint, unless the check knows better."""
    known = CODES[code]
    return Finding(
        code=code,
        severity=known.severity if severity is None else severity,
        effect=known.effect if effect is None else effect,
        subject=subject,
        message=message,
        hint=hint or known.todo,
    )


ANOMALIES = frozenset(
    [
        "loss-spike",
        "loss-oscillation",
        "loss-divergence",
        "loss-plateau",
        "nonfinite-loss",
        "grad-explosion",
        "grad-oscillation",
        "grad-vanishing",
        "clip-saturation",
        "loss-scale-collapse",
        "lr-discontinuity",
        "lr-frozen",
        "loss-discontinuity",
        "restart-from-scratch",
        "data-repeat",
        "no-progress",
        "overfitting",
        "slice-regression",
        "throughput-drop",
        "throughput-periodic",
        "straggler",
        "input-bound",
        "communication-bound",
        "memory-creep",
        "memory-jump",
        "out-of-memory",
        "hardware-error",
        "rank-lost",
        "definition-changed",
    ]
)
"""The codes of what a metric log gives away; they are no findings on checkpoints."""

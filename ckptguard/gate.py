"""The gate before a training: one answer for every process of a start, and the same one for all of them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptguard.decisions import FOLDER, Agreement, Record
from ckptguard.errors import KeyNotFound, NothingRecognised, StoreError, TargetNotFound, UsageError
from ckptguard.facts import Progress
from ckptguard.identity import Identity, identify
from ckptguard.inspect import Decision, Options, open_target, preflight
from ckptguard.model import RunReport
from ckptguard.ports import WritableStore
from ckptguard.storage.opening import open_store


@dataclass(frozen=True, slots=True)
class Answer:
    """What this process is to do. `checkpoint` is printed as RUN was given, and set only where `decision` is "resume".

    `key` names the decision for the drop-ins of the command ("" where it could not be kept); `made_here` is False where
    another process looked; `report` is there only where this one did.
    """

    decision: str
    checkpoint: str | None
    reasons: tuple[str, ...]
    key: str
    made_here: bool
    report: RunReport | None = None

    @property
    def as_decision(self) -> Decision:
        return Decision(self.decision, self.checkpoint, self.report, self.reasons)


def ask(
    run: str,
    options: Options,
    environment: Mapping[str, str],
    *,
    decision_id: str | None = None,
    alone: bool = False,
    allow_missing: bool = False,
    keep: bool = True,
    progress: Progress | None = None,
) -> Answer:
    """Decide from where to resume, or take what the first process of this start decided.

    `alone`: decide for this process only, whatever the environment says of others. `keep`: leave even such a decision in
    the run, for the drop-ins inside a command that is about to start. Raises what `preflight` raises;
    DecisionFailed where another process looked and could not decide; StoreError where processes cannot agree.
    """
    identity = None if alone else identify(environment, decision_id)
    if identity is None:
        return _alone(run, options, allow_missing, keep, progress)
    return _together(run, options, identity, allow_missing, progress)


def _look(run: str, options: Options, allow_missing: bool, progress: Progress | None) -> Decision:
    try:
        return preflight(run, options, progress)
    except TargetNotFound:
        if not allow_missing:
            raise
        return Decision("fresh", None, None, (f"{run} does not exist",))


def _alone(run: str, options: Options, allow_missing: bool, keep: bool, progress: Progress | None) -> Answer:
    decision = _look(run, options, allow_missing, progress)
    key = uuid.uuid4().hex
    below = _below(run, decision.resume_from)
    kept = keep and (decision.decision == "fresh" or below is not None)
    try:
        if kept:
            Agreement(_store(run)).write(key, _record(decision, below))
    except (StoreError, TargetNotFound, UsageError):
        kept = False  # a run that can only be read: whoever asks inside the command looks again
    return Answer(
        decision.decision, decision.resume_from, decision.reasons, key if kept else "", True, decision.report
    )


def _together(
    run: str, options: Options, identity: Identity, allow_missing: bool, progress: Progress | None
) -> Answer:
    if allow_missing and "://" not in run:
        Path(run).mkdir(parents=True, exist_ok=True)
    store = _store(run)
    _refuse_checkpoint(run, store, options)
    made: list[Decision] = []

    def decide() -> Record:
        made.append(_look(run, options, allow_missing, progress))
        return _record(made[0], _below(run, made[0].resume_from))

    record, mine = Agreement(store).take(identity.key, decide)
    if mine:
        return Answer(
            record.decision, made[0].resume_from, record.reasons, identity.key, True, made[0].report
        )
    if record.checkpoint is None:
        return Answer(record.decision, None, record.reasons, identity.key, False)
    path = f"{run.rstrip('/')}/{record.checkpoint}" if run not in (".", "./") else record.checkpoint
    if "://" not in path and not Path(path).exists():
        raise StoreError(
            f"{path} was decided on by {record.by}, and is not visible here",
            "is the run on a file system that all nodes share? If each has its own, stage from S3: --stage DIR",
        )
    return Answer(record.decision, path, record.reasons, identity.key, False)


def _store(run: str) -> WritableStore:
    store = open_store(run)
    if not isinstance(store, WritableStore):
        raise UsageError(f"{run}: decisions cannot be kept in this kind of store")
    return store


def _refuse_checkpoint(run: str, store: WritableStore, options: Options) -> None:
    """Nothing of ours may lie inside a checkpoint. Looked at only until the first decision lies there."""
    try:
        if next(iter(store.list(FOLDER)), None) is not None:
            return
    except KeyNotFound:
        pass
    try:
        opened, _, _ = open_target(run, options)
    except NothingRecognised:
        return
    if opened.only is not None:
        raise UsageError(
            f"{run} is a checkpoint",
            "name the run that holds it: all nodes take one decision, kept in the run",
        )


def _record(decision: Decision, below: str | None) -> Record:
    step = None
    if decision.report is not None:
        step = next((v.step for v in decision.report.checkpoints if v.path == decision.resume_from), None)
    return Record(decision.decision, below, step, decision.reasons)


def _below(run: str, path: str | None) -> str | None:
    """The part of a printed path below the run, or None."""
    if path is None:
        return None
    if run in (".", "./"):
        return path
    prefix = run.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else None

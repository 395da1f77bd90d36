"""The watcher: each look at a target moves its saves along, and queues the audit of what became complete."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection

from ckptguard.catalog import checkpoints, findings, jobs
from ckptguard.catalog.runs import ensure_run, set_run
from ckptguard.errors import StoreError, TargetNotFound
from ckptguard.jobs.context import Context
from ckptguard.jobs.lifecycle import Look, Phase, Save, Step, advance, inherit, seconds
from ckptguard.jobs.survey import Found, survey
from ckptguard.model import Entry
from ckptguard.settings import RunSettings
from ckptguard.storage import open_store

URGENT = 10
"""A new save is proven before anything that was planned."""


@dataclass
class Watched:
    """What the watcher remembers of one run between two looks. Rebuilt from the catalog after a start."""

    run_id: int
    target: str
    saves: dict[str, Save]
    ids: dict[str, int]
    doubtful: str = ""
    surroundings: str = ""
    sealed: frozenset[str] = frozenset()
    logs: tuple[Entry, ...] = ()
    root: str = ""
    prefix: str = ""
    following: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Target:
    """A configured path or prefix, and the runs that were found below it."""

    settings: RunSettings
    runs: dict[str, Watched] = field(default_factory=dict)
    due: float = 0.0
    """When it is looked at next, by the monotonic clock; file events bring it forward."""
    busy: bool = False
    started: float = 0.0

    @property
    def path(self) -> str:
        return self.settings.path


def look(context: Context, target: Target) -> bool:
    """List a target once and keep what changed. Returns whether a save is in progress. Raises SQLAlchemyError."""
    now = context.clock()
    try:
        found = survey(open_store(target.path)).runs
    except (StoreError, TargetNotFound) as error:
        _unreachable(context, target, error.message, now)
        return False
    context.health.good(f"run {target.path}")
    changed: list[Watched] = []
    with context.catalog.write() as connection:
        for one in found:
            watched = target.runs.get(one.prefix) or _enter(connection, target, one, now)
            target.runs[one.prefix] = watched
            if _advance(context, connection, watched, one, now):
                changed.append(watched)
                jobs.enqueue(
                    connection, "audit", now=now, run_id=watched.run_id, origin="watch", priority=URGENT
                )
            set_run(connection, watched.run_id, looked_at=now, error=None)
        for prefix, watched in target.runs.items():
            if prefix not in {one.prefix for one in found}:
                _advance(context, connection, watched, _nothing(prefix), now)
    if changed:
        context.wake.set()
    return any(save.phase.open for watched in target.runs.values() for save in watched.saves.values())


def _nothing(prefix: str) -> Found:
    return Found(prefix, {}, "", "", (), frozenset())


def _unreachable(context: Context, target: Target, message: str, now: float) -> None:
    """A directory that is not there says nothing about its checkpoints: an unmounted volume looks the same."""
    context.health.bad(f"run {target.path}", message)
    with context.catalog.write() as connection:
        if not target.runs:
            target.runs[""] = _enter(connection, target, _nothing(""), now)
        for watched in target.runs.values():
            set_run(connection, watched.run_id, error=message)


def _enter(connection: Connection, target: Target, found: Found, now: float) -> Watched:
    """The run of a target as the catalog knows it; made when it is new."""
    path = f"{target.path.rstrip('/')}/{found.prefix}" if found.prefix else target.path
    name = target.settings.name or os.path.basename(path.rstrip("/")) or path  # noqa: PTH119
    if found.prefix and target.settings.name:
        name = f"{target.settings.name}/{found.prefix}"
    run_id = ensure_run(
        connection,
        path,
        name=name,
        now=now,
        total_steps=target.settings.total_steps,
        gpus=target.settings.gpus,
    )
    watched = Watched(run_id, path, {}, {}, root=target.path, prefix=found.prefix)
    for row in checkpoints.of_run(connection, run_id):
        watched.ids[row["path"]] = row["id"]
        watched.saves[row["path"]] = Save(
            path=row["path"],
            phase=Phase(row["phase"]),
            phase_since=row["phase_since"],
            first_seen=row["first_seen"],
            changed_at=row["changed_at"] or row["first_seen"],
            fingerprint=row["fingerprint"],
            bytes=row["bytes"],
            step=row["step"],
            completed_at=row["completed_at"],
        )
    return watched


def _advance(context: Context, connection: Connection, watched: Watched, found: Found, now: float) -> bool:
    """Move every save of a run along. Returns whether there is something to audit."""
    settings = context.settings.watch
    steps = _decide(watched.saves, found.looks, now, settings.settle, settings.stall_after)
    to_audit = False
    for path, step in steps.items():
        before = watched.saves.get(path)
        if before == step.save:
            continue
        seen = found.looks.get(path)
        watched.ids[path] = _keep(connection, watched.run_id, path, step, seen, now)
        watched.saves[path] = step.save
        if step.save.phase.gone:
            # The catalog remembers it; a service that runs for months need not.
            del watched.saves[path]
        became_complete = step.save.phase is Phase.COMPLETE
        if became_complete and seen is not None and (before is None or before.phase is not Phase.COMPLETE):
            _keep_save(connection, watched, path, step.save, seen)
        if step.save.phase.gone:
            findings.close_checkpoint(connection, watched.ids.pop(path), now)
        # What is growing will be looked at when it is complete; what failed or went changes what is said of the run.
        to_audit |= step.save.phase in (Phase.COMPLETE, Phase.FAILED, Phase.ROTATED, Phase.STALLED)
    to_audit |= (watched.doubtful, watched.surroundings) != (found.doubtful, found.surroundings)
    for path in found.sealed - watched.sealed:
        if path in watched.ids:
            checkpoints.set_checkpoint(connection, watched.ids[path], sealed=True)
            checkpoints.add_event(connection, watched.run_id, watched.ids[path], now, "sealed")
    watched.doubtful, watched.surroundings = found.doubtful, found.surroundings
    watched.sealed = frozenset(path for path in found.sealed if path in watched.ids)
    watched.logs = found.logs
    return to_audit


def _decide(
    saves: Mapping[str, Save], looks: Mapping[str, Look], now: float, settle: float, stall_after: float
) -> dict[str, Step]:
    """What becomes of each save, pure over both maps."""
    done = [
        s.step
        for path, s in saves.items()
        if s.phase is Phase.COMPLETE and path in looks and s.step is not None
    ]
    newest = max(done, default=None)
    steps: dict[str, Step] = {}

    def age(path: str) -> tuple[int, str]:
        known = looks.get(path) or saves[path]
        return (known.step if known.step is not None else -1, path)

    # By step, so that the catalog numbers checkpoints in their order.
    for path in sorted(saves.keys() | looks.keys(), key=age):
        seen = looks.get(path)
        newer = newest is not None and seen is not None and seen.step is not None and newest > seen.step
        step = advance(
            saves.get(path), seen, now, settle=settle, stall_after=stall_after, newer_complete=newer
        )
        if step is not None:
            steps[path] = step
    gone = {
        s.save.step: s.save
        for s in steps.values()
        if s.save.phase is Phase.VANISHED and s.save.step is not None and s.save.phase_since == now
    }
    fresh = [s.save for path, s in steps.items() if path not in saves]
    for save in inherit(fresh, gone):
        steps[save.path] = Step(save, steps[save.path].events)
    return steps


def _keep(connection: Connection, run_id: int, path: str, step: Step, seen: Look | None, now: float) -> int:
    save = step.save
    values: dict[str, object] = {
        "phase": str(save.phase),
        "phase_since": save.phase_since,
        "first_seen": save.first_seen,
        "changed_at": save.changed_at,
        "fingerprint": save.fingerprint,
        "completed_at": save.completed_at,
        "gone_at": now if save.phase.gone else None,
    }
    if seen is not None:
        values |= {"bytes": seen.bytes, "files": seen.files, "modified": seen.modified, "layout": seen.layout}
        if seen.step is not None:
            values["step"] = seen.step
    checkpoint_id = checkpoints.put_checkpoint(connection, run_id, path, values)
    for what, detail in step.events:
        checkpoints.add_event(connection, run_id, checkpoint_id, now, what, detail)
    return checkpoint_id


def _keep_save(connection: Connection, watched: Watched, path: str, save: Save, seen: Look) -> None:
    took = seconds(save, seen)
    completed = save.completed_at if save.completed_at is not None else seen.modified
    checkpoints.add_save(
        connection,
        run_id=watched.run_id,
        checkpoint_id=watched.ids[path],
        step=save.step,
        started=completed - (took or 0.0),
        completed=completed,
        seconds=took,
        bytes=seen.bytes,
        watched=save.watched,
    )

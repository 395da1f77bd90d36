"""Follows the metric logs of a run: steps, loss, a heartbeat of each rank; and from them the state of the training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection

from ckptguard.catalog import checkpoints, logs
from ckptguard.catalog.runs import get_run, set_run
from ckptguard.errors import StoreError, TargetNotFound
from ckptguard.jobs import activity as act
from ckptguard.jobs.assess import assess
from ckptguard.jobs.context import Context, run_settings
from ckptguard.jobs.lifecycle import Phase
from ckptguard.jobs.tail import Tail, tail
from ckptguard.jobs.watch import Watched
from ckptguard.layouts._base import build_directory
from ckptguard.logs._base import parse_json, whole
from ckptguard.logs.jsonl import JsonLines
from ckptguard.logs.search import read_logs
from ckptguard.logs.steplog import StepLog
from ckptguard.model import Entry, LogRow
from ckptguard.ports import Store
from ckptguard.seals import OURS
from ckptguard.storage import open_store

_RANK = re.compile(r"(?:rank[-_.]?|steps-)(\d+)")
HISTORY = "(history)"
"""The name under which logs that do not grow line by line are remembered: the Trainer's state, CSV, TensorBoard."""
ENDED = frozenset({"end", "finished", "train_end"})


def follow(context: Context, watched: Watched) -> None:
    """Read what a run logged since the last time and judge its state. Raises SQLAlchemyError; a log that cannot be read waits."""
    with watched.following:
        _follow(context, watched)


def _follow(context: Context, watched: Watched) -> None:
    now = context.clock()
    with context.catalog.read() as connection:
        known = logs.positions(connection, watched.run_id)
    try:
        store = open_store(watched.root)
        new = _growing(store, watched, known) or _history(store, watched, known)
    except (StoreError, TargetNotFound):
        new = {}
    with context.catalog.write() as connection:
        pulses = _keep(connection, watched.run_id, known, new)
        _learn_plan(context, connection, watched, new)
        _judge(
            context,
            connection,
            watched.run_id,
            pulses,
            [row for _, rows in new.values() for row in rows],
            now,
        )
        assess(context, connection, watched.run_id)


New = dict[str, tuple[dict[str, Any], tuple[LogRow, ...]]]
"""By file: its place (position, size, modified) and its new rows."""


def _growing(store: Store, watched: Watched, known: Mapping[str, Mapping[str, Any]]) -> New:
    """The logs that grow line by line: ours if there are any, else JSON lines."""
    ours = [e for e in watched.logs if OURS in e.key.split("/")]
    new: New = {}
    for listed in ours or watched.logs:
        entry = store.stat(listed.key)
        position = int(known[entry.key]["position"]) if entry.key in known else 0
        if entry.key in known and entry.size == position:
            continue
        part: Tail = tail(store, entry, position)
        rows = (StepLog() if ours else JsonLines()).rows(part.data)
        if entry.key not in known and not any(row.loss is not None or row.lr is not None for row in rows):
            continue  # training data is JSON lines too
        place = {"position": part.position, "size": entry.size, "modified": entry.modified}
        new[entry.key] = (place, tuple(rows))
    return new


def _history(store: Store, watched: Watched, known: Mapping[str, Mapping[str, Any]]) -> New:
    """Logs that are written anew each time: the rows after the last known step."""
    if watched.logs and any(e.key in known for e in watched.logs):
        return {}
    prefix = f"{watched.prefix}/" if watched.prefix else ""
    entries = [e for e in store.list(watched.prefix) if e.kind == "file" and _tells(e)]
    newest = max((e.modified for e in entries), default=0.0)
    size = sum(e.size for e in entries)
    before = known.get(HISTORY)
    if not entries or (before is not None and before["size"] == size):
        return {}
    directory = build_directory(entries)
    for part in [p for p in prefix.split("/") if p]:
        directory = directory.dirs[part]
    rows = read_logs(store, directory)
    done = int(before["step"]) if before is not None and before["step"] is not None else -1
    fresh = tuple(row for row in rows if row.step > done)
    place = {"position": 0, "size": size, "modified": newest, "planned": _planned(store, entries)}
    return {HISTORY: (place, fresh)}


def _planned(store: Store, entries: Sequence[Entry]) -> int | None:
    """The steps that a Trainer plans, by its newest state."""
    states = [e for e in entries if e.name == "trainer_state.json"]
    newest = max(states, key=lambda e: e.modified, default=None)
    state = parse_json(store.read(newest.key)) if newest is not None else None
    return whole(state.get("max_steps")) if isinstance(state, dict) else None


def _tells(entry: Entry) -> bool:
    name = entry.name
    return name == "trainer_state.json" or name.endswith(".csv") or name.startswith("events.out")


def rank_of(file: str) -> int | None:
    """The rank whose log a file is, by its name."""
    found = _RANK.search(file.rpartition("/")[2])
    return int(found[1]) if found else None


def _pulse(row: Mapping[str, Any]) -> act.Pulse:
    return act.Pulse(row["file"], row["rank"], row["step"], row["at"], row["interval"], row["pause"])


def _keep(
    connection: Connection, run_id: int, known: Mapping[str, Mapping[str, Any]], new: New
) -> list[act.Pulse]:
    """Store positions, curve and attempts; returns the beat of every log."""
    pulses = {file: _pulse(row) for file, row in known.items()}
    for file, (place, rows) in new.items():
        rank = rank_of(file)
        beat = act.pulse(file, rank, pulses.get(file), rows, place["modified"])
        pulses[file] = beat
        logs.put_position(
            connection,
            run_id,
            file,
            {"rank": rank, "position": place["position"], "size": place["size"]}
            | {name: getattr(beat, name) for name in ("step", "at", "interval", "pause")},
        )
        if rank in (None, 0):
            _keep_rows(connection, run_id, [row for row in rows if "event" not in row.extra])
        _keep_events(connection, run_id, [row for row in rows if row.extra.get("event") == "save"])
    return list(pulses.values())


def _learn_plan(context: Context, connection: Connection, watched: Watched, new: New) -> None:
    """The planned steps that the log itself states count where the configuration says nothing."""
    planned = new[HISTORY][0].get("planned") if HISTORY in new else None
    if planned and planned > 0 and run_settings(context.settings, watched.target).total_steps is None:
        set_run(connection, watched.run_id, total_steps=planned)


def _keep_rows(connection: Connection, run_id: int, rows: Sequence[LogRow]) -> None:
    with_values = [row for row in rows if row.loss is not None or row.lr is not None]
    logs.add_metrics(
        connection,
        run_id,
        [
            {
                "attempt": row.attempt or 1,
                "step": row.step,
                "at": act.time_of(row),
                **{
                    name: logs.finite(getattr(row, name))
                    for name in ("loss", "lr", "grad_norm", "loss_scale")
                },
            }
            for row in with_values
        ],
    )
    by_attempt: dict[int, list[LogRow]] = {}
    for row in rows:
        by_attempt.setdefault(row.attempt or 1, []).append(row)
    for number, members in by_attempt.items():
        logs.put_attempt(
            connection,
            run_id,
            number,
            step=members[-1].step,
            first_at=act.time_of(members[0]),
            at=act.time_of(members[-1]),
        )


def _keep_events(connection: Connection, run_id: int, rows: Sequence[LogRow]) -> None:
    """How long the training stood still for a save, as the recorder measured it."""
    for row in rows:
        parts = [row.extra.get(name) for name in ("save", "before")]
        known = [float(part) for part in parts if isinstance(part, int | float)]
        if known:
            checkpoints.set_blocked(connection, run_id, row.step, sum(known))


def _judge(
    context: Context,
    connection: Connection,
    run_id: int,
    pulses: Sequence[act.Pulse],
    rows: Sequence[LogRow],
    now: float,
) -> None:
    run = get_run(connection, run_id)
    assert run is not None
    known = checkpoints.of_run(connection, run_id)
    complete = [row for row in known if row["phase"] == Phase.COMPLETE]
    steps = [row["step"] for row in complete if row["step"] is not None]
    changes = [row["changed_at"] if row["completed_at"] is None else row["completed_at"] for row in known]
    ended = any(row.extra.get("event") in ENDED for row in rows)
    seen = act.activity(
        pulses,
        now,
        total_steps=run["total_steps"],
        newest_step=max(steps, default=None),
        last_change=max((c for c in changes if c is not None), default=None),
        save_interval=(run["usual"] or {}).get("interval"),
        ended=ended or (run["state"] == act.State.FINISHED and not rows and bool(pulses)),
    )
    beats = [p for p in pulses if p.at is not None]
    lead = max(beats, key=lambda p: p.at or 0.0, default=None)
    values: dict[str, Any] = {"state_reason": seen.reason}
    if run["state"] != seen.state:
        values |= {"state": str(seen.state), "state_since": seen.since or now}
        checkpoints.add_event(connection, run_id, None, now, str(seen.state), seen.reason)
    if lead is not None:
        values |= {"step": lead.step, "step_at": lead.at, "step_seconds": lead.interval}
    set_run(connection, run_id, **values)
    bad = list(act.nonfinite(rows))
    stopped = list(
        act.stopped(
            seen,
            max(steps, default=None),
            now,
            after=context.settings.policy.stopped_after,
            planned=run["total_steps"],
        )
    )
    lost = list(act.lost_ranks(pulses, now))
    logs.sync_anomalies(
        connection, run_id, ("rank-lost", "no-progress"), [_row(a) for a in (*stopped, *lost)], now
    )
    healthy = [row for row in rows if row.loss is not None]
    if bad:
        logs.sync_anomalies(connection, run_id, ("nonfinite-loss",), [_row(a) for a in bad], now)
    elif len(healthy) >= 3 and not list(act.nonfinite(healthy[-3:])):
        # Finite losses again: the training recovered, or went on from an earlier checkpoint.
        logs.sync_anomalies(connection, run_id, ("nonfinite-loss",), [], now)


def _row(anomaly: act.Anomaly) -> dict[str, Any]:
    values = asdict(anomaly)
    step = values.pop("step")
    scope = values.pop("scope")
    if anomaly.code == "rank-lost":
        scope = " ".join(anomaly.evidence.split()[:2])
    return {**values, "scope": scope, "first_step": step, "last_step": step}

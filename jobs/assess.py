"""Brings what is said of a run up to date: its habits, its work at risk, its troubles and so its alerts.

One transaction: an alert and what caused it are kept together or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, select

from ckptguard.catalog import checkpoints, findings, logs, outbox
from ckptguard.catalog.runs import get_run, set_run
from ckptguard.catalog.tables import findings as findings_table
from ckptguard.catalog.troubles import Trouble, crowd, decide
from ckptguard.codes import finding
from ckptguard.jobs import rhythm, risk
from ckptguard.jobs.activity import State
from ckptguard.jobs.context import Context, run_settings
from ckptguard.jobs.hints import meant
from ckptguard.jobs.lifecycle import Phase
from ckptguard.jobs.space import room
from ckptguard.model import Evidence, Finding, Resume, Severity
from ckptguard.units import duration

NEXT = {
    "nonfinite-loss": "stop the training before it saves more of this; resume by ckptguard preflight RUN",
    "rank-lost": "look at the node of that rank; if the job has to start again: ckptguard preflight RUN",
    "no-progress": "look at the training's own output; resume by ckptguard preflight RUN",
}
"""What to do about what the log gives away."""


def assess(context: Context, connection: Connection, run_id: int) -> int:
    """Look at one run as the catalog knows it now. Returns how many messages were put into the outbox."""
    run = get_run(connection, run_id)
    if run is None:
        return 0
    now = context.clock()
    rows = checkpoints.of_run(connection, run_id)
    known = [_known(row) for row in rows if row["phase"] == Phase.COMPLETE]
    saves = _saves(connection, run_id)
    usual = rhythm.usual(saves)
    state = State(run["state"])
    at_risk = risk.work_at_risk(
        known,
        now=now,
        step=run["step"],
        # Without a log, a run that stands still stopped at its last sign of life.
        step_at=run["step_at"] or (run["state_since"] if state is State.PAUSED else None),
        step_seconds=run["step_seconds"],
        started=_started(run, rows),
        running=state is State.RUNNING,
        gpus=run["gpus"],
    ).document()
    safe, best = risk.newest_safe(known), risk.resume_from(known)
    set_run(
        connection,
        run_id,
        work_at_risk={**at_risk, "newest_safe": _full(run["target"], at_risk["newest_safe"])},
        newest_safe=safe.path if safe else None,
        resume_from=best.path if best else None,
        usual=asdict(usual),
    )
    seen = [
        *_rhythm(context, run, rows, saves),
        *_safety(context, run, rows, known),
        *_room(context, run, usual, rows),
    ]
    findings.sync_findings(connection, run_id, None, "service", [asdict(f) for f in seen], now)
    troubles = crowd(_troubles(context, connection, run, rows))
    return outbox.apply(
        connection,
        decide(troubles, outbox.standing(connection, run_id), now, context.settings.policy.remind_every),
        now,
        sinks=context.sinks((run["target"], run["name"])),
        work_at_risk={**at_risk, "newest_safe": _full(run["target"], at_risk["newest_safe"])},
        url=context.page,
        target=run["target"],
    )


def _full(target: str, path: str | None) -> str | None:
    if path is None:
        return None
    return f"{target.rstrip('/')}/{path}" if path else target


def _known(row: dict[str, Any]) -> risk.Known:
    """A verdict on other bytes than those that are there proves nothing."""
    current = row["judged_fingerprint"] == row["fingerprint"]
    return risk.Known(
        row["path"],
        row["step"],
        row["completed_at"],
        Resume(row["resume"]) if current else Resume.UNKNOWN,
        Evidence(row["evidence"]) if current else Evidence.LISTING,
        bool(row["as_complete"]) and current,
    )


def _saves(connection: Connection, run_id: int) -> list[rhythm.Saved]:
    return [
        rhythm.Saved(row["path"], row["step"], row["completed"], row["seconds"], row["bytes"])
        for row in checkpoints.recent_saves(connection, run_id)
    ]


def _started(run: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    times = [row["first_seen"] for row in rows] + ([run["step_at"]] if run["step_at"] else [])
    return min(times, default=None)


def _rhythm(
    context: Context, run: dict[str, Any], rows: Sequence[dict[str, Any]], saves: Sequence[rhythm.Saved]
) -> Iterator[Finding]:
    policy, now = context.settings.policy, context.clock()
    writing = [row for row in rows if Phase(row["phase"]).open]
    yield from rhythm.odd_saves(saves, policy)
    for row in writing:
        if row["phase"] == Phase.STALLED:
            idle = now - (row["changed_at"] or now)
            yield finding(
                "stalled-save",
                row["path"],
                f"the save wrote nothing for {duration(idle)} and is not complete",
                "look at the training process and its storage; resume by ckptguard preflight "
                + run["target"],
            )
    if State(run["state"]) is State.FINISHED:
        return
    running = None if run["step_at"] is None else run["state"] == State.RUNNING
    yield from rhythm.missed(
        saves,
        now,
        policy,
        target=run["target"],
        running=running,
        step=run["step"],
        writing=any(row["phase"] != Phase.STALLED for row in writing),
    )


def _safety(
    context: Context, run: dict[str, Any], rows: Sequence[dict[str, Any]], known: Sequence[risk.Known]
) -> Iterator[Finding]:
    """No safe checkpoint at all, or the only one is the next to be rotated away."""
    judged = [k for k in known if k.evidence > Evidence.LISTING]
    if not judged or len(judged) < len(known):
        return
    safe = [k for k in judged if k.resume.safe]
    if not safe:
        yield finding(
            "no-safe-checkpoint",
            run["target"],
            f"none of the {len(judged)} checkpoints may be resumed from",
            f"ckptguard audit {run['target']} says why; look for a replica",
        )
        return
    keep = run_settings(context.settings, run["target"]).keep
    newer = [k for k in judged if not k.resume.safe and (k.step or 0) > (safe[-1].step or 0)]
    if keep is not None and len(safe) == 1 and newer and len(rows) >= keep and judged[0] is safe[0]:
        yield finding(
            "retention-risk",
            safe[0].path,
            f"it is the only safe checkpoint, the oldest of {len(rows)}, and the training keeps {keep}: "
            "the next save will delete it",
            f"copy it elsewhere now: ckptguard replicate {_full(run['target'], safe[0].path)} DESTINATION",
        )


def _room(
    context: Context, run: dict[str, Any], usual: rhythm.Usual, rows: Sequence[dict[str, Any]]
) -> Iterator[Finding]:
    if "://" in run["target"] or State(run["state"]) is State.FINISHED:
        return
    free_bytes, free_inodes = room(run["target"], [row["path"] for row in rows[-1:]])
    sizes = [row["bytes"] for row in rows if row["phase"] == Phase.COMPLETE]
    files = [row["files"] for row in rows if row["phase"] == Phase.COMPLETE]
    yield from rhythm.low_space(
        free_bytes,
        free_inodes,
        usual.bytes or max(sizes, default=None),
        max(files, default=None),
        context.settings.policy,
        run["target"],
    )


def _troubles(
    context: Context, connection: Connection, run: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> Iterator[Trouble]:
    """Every loud finding and anomaly that holds now: one trouble a checkpoint, one a code for the run."""
    query = select(findings_table).where(
        findings_table.c.run_id == run["id"],
        findings_table.c.gone_at.is_(None),
        findings_table.c.severity != Severity.INFO,
    )
    held = [dict(row) for row in connection.execute(query.order_by(findings_table.c.id)).mappings()]
    # As for `--silence`: the day is that of UTC.
    today = datetime.fromtimestamp(context.clock(), UTC).date()
    held = [one for one in held if not context.settings.policy.silent(one["code"], today)]
    paths = {row["id"]: row for row in rows}
    by_checkpoint: dict[int, list[dict[str, Any]]] = {}
    for one in held:
        if one["checkpoint_id"] in paths:
            by_checkpoint.setdefault(one["checkpoint_id"], []).append(one)
    for row in rows:
        if row["id"] in by_checkpoint:
            yield _of_checkpoint(run, row, by_checkpoint[row["id"]])
    said: set[str] = set()
    for one in held:
        if one["checkpoint_id"] is None and one["code"] not in said:
            said.add(one["code"])
            yield _of_run(run, one, {row["path"]: row["id"] for row in rows})
    for anomaly in logs.open_anomalies(connection, run["id"]):
        if anomaly["severity"] != Severity.INFO and not context.settings.policy.silent(
            anomaly["code"], today
        ):
            yield _of_anomaly(run, anomaly)


def _of_checkpoint(run: dict[str, Any], row: dict[str, Any], held: Sequence[dict[str, Any]]) -> Trouble:
    worst = max(held, key=lambda f: (Severity(f["severity"]).rank, f["effect"] == "unsafe", -f["id"]))
    full = _full(run["target"], row["path"])
    more = f" (and {len(held) - 1} more findings)" if len(held) > 1 else ""
    return Trouble(
        key=f"{run['target']}:{row['path']}",
        run=run["target"],
        run_id=run["id"],
        code=worst["code"],
        severity=Severity(worst["severity"]),
        title=f"{worst['code']}: {row['path'] or run['name']} of {run['name']} is {row['resume']}",
        message=f"{worst['subject']}: {worst['message']}{more}",
        hint=meant(worst["hint"] or "ckptguard preflight RUN", run["target"], full),
        since=min(f["first_seen"] for f in held),
        checkpoint=full,
        checkpoint_id=row["id"],
    )


def _of_run(run: dict[str, Any], one: dict[str, Any], ids: dict[str, int]) -> Trouble:
    return Trouble(
        key=f"{run['target']}:{one['code']}",
        run=run["target"],
        run_id=run["id"],
        code=one["code"],
        severity=Severity(one["severity"]),
        title=f"{one['code']}: {run['name']}",
        message=f"{one['subject']}: {one['message']}" if one["subject"] != run["target"] else one["message"],
        hint=meant(one["hint"], run["target"], None),
        since=one["first_seen"],
        checkpoint=_full(run["target"], one["subject"]) if one["subject"] in ids else None,
        checkpoint_id=ids.get(one["subject"]),
    )


def _of_anomaly(run: dict[str, Any], one: dict[str, Any]) -> Trouble:
    return Trouble(
        key=f"{run['target']}:{one['code']}:{one['scope']}",
        run=run["target"],
        run_id=run["id"],
        code=one["code"],
        severity=Severity(one["severity"]),
        title=f"{one['code']}: {run['name']} at step {one['first_step']}",
        message=one["evidence"],
        hint=meant(NEXT.get(one["code"], "resume by ckptguard preflight RUN"), run["target"], None),
        since=one["first_seen"],
    )


def assess_all(context: Context, run_ids: Iterable[int]) -> None:
    """Look at many runs, each in a transaction of its own."""
    for run_id in run_ids:
        with context.catalog.write() as connection:
            assess(context, connection, run_id)

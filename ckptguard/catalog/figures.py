"""The numbers behind the metrics: each one grouped query over an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, case, func, select

from ckptguard.catalog import outbox
from ckptguard.catalog._rows import Row, rows
from ckptguard.catalog.tables import (
    alerts,
    checkpoints,
    files,
    findings,
    jobs,
    restores,
    runs,
    saves,
    uploads,
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Rows by run id; `names` maps it to the run's target."""

    names: dict[int, str]
    runs: list[Row]
    newest: list[tuple[int, str, float]]
    checkpoints: list[Any]
    saves: dict[int, tuple[list[int], float]]
    newest_save: list[Any]
    uploads: list[Any]
    findings: list[Any]
    alerts: list[Any]
    jobs: list[Any]
    open_jobs: list[Any]
    scrubbed: list[tuple[int, float]]
    restores: list[Any]
    outbox: dict[str, tuple[int, float]]


def collect(connection: Connection, now: float, buckets: Sequence[float], within: float) -> Figures:
    """All figures of the runs that are watched."""
    watched = rows(connection, select(runs).where(runs.c.watched).order_by(runs.c.id))
    names = {run["id"]: run["target"] for run in watched}

    def grouped(*columns: ColumnElement[Any], where: Sequence[ColumnElement[bool]] = ()) -> list[Any]:
        query = select(*columns, func.count()).where(*where).group_by(*columns).order_by(*columns)
        found = connection.execute(query).all()
        return [row for row in found if row[0] in names]

    here = checkpoints.c.gone_at.is_(None)
    ended = select(jobs.c.name, jobs.c.state, func.count()).group_by(jobs.c.name, jobs.c.state)
    by_state = [tuple(row) for row in connection.execute(ended.order_by(jobs.c.name, jobs.c.state)).all()]
    restored = (
        select(checkpoints.c.run_id, restores.c.result, func.count())
        .join(checkpoints, checkpoints.c.id == restores.c.checkpoint_id)
        .group_by(checkpoints.c.run_id, restores.c.result)
    )
    return Figures(
        names=names,
        runs=watched,
        newest=[row for row in _newest(connection) if row[0] in names],
        checkpoints=grouped(checkpoints.c.run_id, checkpoints.c.resume, where=[here]),
        saves={run: value for run, value in _histogram(connection, buckets).items() if run in names},
        newest_save=[row for row in _newest_save(connection) if row[0] in names],
        uploads=[row for row in _uploads(connection) if row[0] in names],
        findings=grouped(
            findings.c.run_id, findings.c.code, findings.c.severity, where=[findings.c.gone_at.is_(None)]
        ),
        alerts=grouped(alerts.c.run_id, alerts.c.severity, where=[alerts.c.state == "firing"]),
        jobs=[row for row in by_state if row[1] not in ("queued", "running")],
        open_jobs=[row for row in by_state if row[1] in ("queued", "running")],
        scrubbed=[row for row in _scrubbed(connection, now - within) if row[0] in names],
        restores=[row for row in connection.execute(restored).all() if row[0] in names],
        outbox={sink: (count, since) for sink, (count, since, _) in outbox.pending(connection).items()},
    )


def _newest(connection: Connection) -> list[tuple[int, str, float]]:
    """When the newest checkpoint of each kind of proof was complete."""
    current = checkpoints.c.judged_fingerprint == checkpoints.c.fingerprint
    safe = checkpoints.c.resume.in_(("exact", "lossy")) & current
    proofs = {
        "complete": checkpoints.c.phase == "complete",
        "verified": safe & checkpoints.c.evidence.in_(("content", "restored", "replayed")),
        "restored": safe & (checkpoints.c.restored_result == "continuous"),
    }
    query = (
        select(
            checkpoints.c.run_id,
            *(
                func.max(case((holds, checkpoints.c.completed_at))).label(name)
                for name, holds in proofs.items()
            ),
        )
        .where(checkpoints.c.gone_at.is_(None))
        .group_by(checkpoints.c.run_id)
    )
    return [
        (row["run_id"], proof, float(row[proof]))
        for row in rows(connection, query)
        for proof in proofs
        if row[proof] is not None
    ]


def _histogram(connection: Connection, buckets: Sequence[float]) -> dict[int, tuple[list[int], float]]:
    """For each run the cumulative counts of save durations (the last one is of all), and their sum."""
    columns = [func.sum(case((saves.c.seconds <= bound, 1), else_=0)) for bound in buckets]
    query = (
        select(saves.c.run_id, *columns, func.count(), func.sum(saves.c.seconds))
        .where(saves.c.seconds.is_not(None))
        .group_by(saves.c.run_id)
    )
    return {row[0]: ([int(n) for n in row[1:-1]], float(row[-1])) for row in connection.execute(query).all()}


def _newest_save(connection: Connection) -> list[Any]:
    newest = select(func.max(saves.c.id)).group_by(saves.c.run_id)
    query = select(saves.c.run_id, saves.c.bytes, saves.c.blocked).where(saves.c.id.in_(newest))
    return list(connection.execute(query).all())


def _uploads(connection: Connection) -> list[Any]:
    newest = (
        select(func.max(uploads.c.id))
        .join(checkpoints, checkpoints.c.id == uploads.c.checkpoint_id)
        .where(uploads.c.lag.is_not(None))
        .group_by(checkpoints.c.run_id, uploads.c.destination)
    )
    query = (
        select(checkpoints.c.run_id, uploads.c.destination, uploads.c.lag)
        .join(checkpoints, checkpoints.c.id == uploads.c.checkpoint_id)
        .where(uploads.c.id.in_(newest))
    )
    return list(connection.execute(query).all())


def _scrubbed(connection: Connection, since: float) -> list[tuple[int, float]]:
    query = (
        select(
            checkpoints.c.run_id,
            func.sum(files.c.size),
            func.sum(case((files.c.read_at >= since, files.c.size), else_=0)),
        )
        .join(checkpoints, checkpoints.c.id == files.c.checkpoint_id)
        .where(checkpoints.c.gone_at.is_(None))
        .group_by(checkpoints.c.run_id)
    )
    return [
        (row[0], float(row[2]) / float(row[1]) if row[1] else 1.0) for row in connection.execute(query).all()
    ]

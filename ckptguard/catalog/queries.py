"""What the API and the pages ask: newest first, a page at a time, each in one or two indexed queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, case, func, select

from ckptguard.catalog._rows import Row, first, rows
from ckptguard.catalog.tables import (
    alerts,
    anomalies,
    attempts,
    checkpoints,
    events,
    files,
    findings,
    jobs,
    metrics,
    restores,
    runs,
    saves,
    tensors,
    uploads,
)

MOST = 200


@dataclass(frozen=True, slots=True)
class Page:
    """Some rows, and the cursor of those that follow (None at the end)."""

    items: list[Row]
    next: int | None


def _page(
    connection: Connection, query: Select[Any], key: ColumnElement[Any], cursor: int | None, limit: int, *, up: bool = False
) -> Page:  # fmt: skip
    """By id, so that a page is quick however far it is, and stays the same while rows are added."""
    limit = max(1, min(limit, MOST))
    if cursor is not None:
        query = query.where(key > cursor if up else key < cursor)
    found = rows(connection, query.order_by(key if up else key.desc()).limit(limit + 1))
    more = len(found) > limit
    found = found[:limit]
    return Page(found, int(found[-1]["id"]) if more and found else None)


# --- runs ---------------------------------------------------------------------------------------------


def runs_page(connection: Connection, *, cursor: int | None = None, limit: int = 100) -> Page:
    page = _page(connection, select(runs).where(runs.c.watched), runs.c.id, cursor, limit, up=True)
    add_counts(connection, page.items)
    return page


def one_run(connection: Connection, run_id: int) -> Row | None:
    run = first(connection, select(runs).where(runs.c.id == run_id))
    if run is not None:
        add_counts(connection, [run])
    return run


def add_counts(connection: Connection, items: Sequence[Row]) -> None:
    """Put the numbers of checkpoints by verdict, of open alerts, and the last save times beside each run."""
    ids = [run["id"] for run in items]
    by_resume = (
        select(checkpoints.c.run_id, checkpoints.c.resume, func.count())
        .where(checkpoints.c.run_id.in_(ids), checkpoints.c.gone_at.is_(None))
        .group_by(checkpoints.c.run_id, checkpoints.c.resume)
    )
    firing = (
        select(alerts.c.run_id, func.count(), func.sum(case((alerts.c.severity == "error", 1), else_=0)))
        .where(alerts.c.run_id.in_(ids), alerts.c.state == "firing")
        .group_by(alerts.c.run_id)
    )
    counts: dict[int, dict[str, int]] = {}
    for run_id, resume, count in connection.execute(by_resume).all():
        counts.setdefault(run_id, {})[resume] = int(count)
    alarms = {row[0]: (int(row[1]), int(row[2] or 0)) for row in connection.execute(firing).all()}
    trends = save_trends(connection, ids)
    for run in items:
        run["counts"] = counts.get(run["id"], {})
        run["alerts"], run["errors"] = alarms.get(run["id"], (0, 0))
        run["trend"] = trends.get(run["id"], [])


def save_trends(connection: Connection, ids: Sequence[int], last: int = 24) -> dict[int, list[float]]:
    """The durations of the last saves of each run, oldest first."""
    place = func.row_number().over(partition_by=saves.c.run_id, order_by=saves.c.completed.desc())
    inner = (
        select(saves.c.run_id, saves.c.completed, saves.c.seconds, place.label("place"))
        .where(saves.c.run_id.in_(list(ids)), saves.c.seconds.is_not(None))
        .subquery()
    )
    query = (
        select(inner.c.run_id, inner.c.seconds)
        .where(inner.c.place <= last)
        .order_by(inner.c.run_id, inner.c.completed)
    )
    trends: dict[int, list[float]] = {}
    for run_id, seconds in connection.execute(query).all():
        trends.setdefault(run_id, []).append(float(seconds))
    return trends


# --- checkpoints --------------------------------------------------------------------------------------


def _with_target() -> Select[Any]:
    return select(checkpoints, runs.c.target, runs.c.name.label("run_name")).join(
        runs, runs.c.id == checkpoints.c.run_id
    )


def checkpoints_page(
    connection: Connection, *, run: int | None = None, resume: str | None = None, since: float | None = None,
    gone: bool = False, cursor: int | None = None, limit: int = 100,
) -> Page:  # fmt: skip
    query = _with_target()
    if run is not None:
        query = query.where(checkpoints.c.run_id == run)
    if resume is not None:
        query = query.where(checkpoints.c.resume == resume)
    if since is not None:
        query = query.where(checkpoints.c.first_seen >= since)
    if not gone:
        query = query.where(checkpoints.c.gone_at.is_(None))
    return _page(connection, query, checkpoints.c.id, cursor, limit)


def one_checkpoint(connection: Connection, checkpoint_id: int) -> Row | None:
    return first(connection, _with_target().where(checkpoints.c.id == checkpoint_id))


def timeline(connection: Connection, run_id: int, limit: int = 400) -> list[Row]:
    """The last checkpoints of a run by step, those that are gone too, oldest first."""
    query = (
        select(checkpoints)
        .where(checkpoints.c.run_id == run_id, checkpoints.c.phase != "vanished")
        .order_by(checkpoints.c.step.desc(), checkpoints.c.id.desc())
        .limit(limit)
    )
    return list(reversed(rows(connection, query)))


def files_of(connection: Connection, checkpoint_id: int) -> list[Row]:
    query = select(files).where(files.c.checkpoint_id == checkpoint_id).order_by(files.c.name)
    return rows(connection, query)


def tensors_of(connection: Connection, checkpoint_id: int, limit: int = 300) -> tuple[list[Row], int]:
    """Some tensors of a checkpoint, those with non-finite values first, and how many there are."""
    where = tensors.c.checkpoint_id == checkpoint_id
    count = connection.execute(select(func.count()).select_from(tensors).where(where)).scalar() or 0
    query = select(tensors).where(where).order_by(tensors.c.nonfinite.desc(), tensors.c.id).limit(limit)
    return rows(connection, query), int(count)


def events_of(
    connection: Connection, *, run: int | None = None, checkpoint: int | None = None, limit: int = 60
) -> list[Row]:
    query = select(events, checkpoints.c.path).outerjoin(
        checkpoints, checkpoints.c.id == events.c.checkpoint_id
    )
    if run is not None:
        query = query.where(events.c.run_id == run)
    if checkpoint is not None:
        query = query.where(events.c.checkpoint_id == checkpoint)
    return rows(connection, query.order_by(events.c.at.desc(), events.c.id.desc()).limit(limit))


def copies_of(connection: Connection, checkpoint_id: int) -> list[Row]:
    return rows(
        connection, select(uploads).where(uploads.c.checkpoint_id == checkpoint_id).order_by(uploads.c.id)
    )


def copies_of_run(connection: Connection, run_id: int, limit: int) -> list[Row]:
    """The newest copies of a run's checkpoints."""
    query = (
        select(uploads, checkpoints.c.path)
        .join(checkpoints, checkpoints.c.id == uploads.c.checkpoint_id)
        .where(checkpoints.c.run_id == run_id)
        .order_by(uploads.c.id.desc())
        .limit(limit)
    )
    return rows(connection, query)


def curve_of(connection: Connection, run_id: int, most: int = 1200) -> list[Row]:
    """The metrics of a run in the order they were logged, thinned to about `most` rows; what is odd stays."""
    count = connection.execute(select(func.count()).where(metrics.c.run_id == run_id)).scalar() or 0
    query = select(metrics).where(metrics.c.run_id == run_id)
    if count > most:
        place = func.row_number().over(order_by=metrics.c.id)
        inner = query.add_columns(place.label("place")).subquery()
        query = select(inner).where((inner.c.place % (count // most + 1) == 0) | inner.c.loss.is_(None))
        return rows(connection, query.order_by(inner.c.id))
    return rows(connection, query.order_by(metrics.c.id))


def saves_of(connection: Connection, run_id: int, limit: int = 400) -> list[Row]:
    query = (
        select(saves)
        .where(saves.c.run_id == run_id)
        .order_by(saves.c.completed.desc(), saves.c.id.desc())
        .limit(limit)
    )
    return list(reversed(rows(connection, query)))


def attempts_of(connection: Connection, run_id: int) -> list[Row]:
    return rows(connection, select(attempts).where(attempts.c.run_id == run_id).order_by(attempts.c.number))


def anomalies_of(connection: Connection, run_id: int, limit: int = 100) -> list[Row]:
    query = select(anomalies).where(anomalies.c.run_id == run_id)
    return rows(connection, query.order_by(anomalies.c.id.desc()).limit(limit))


# --- findings, restores, jobs, alerts -----------------------------------------------------------------


def findings_page(
    connection: Connection, *, run: int | None = None, checkpoint: int | None = None, code: str | None = None,
    severity: str | None = None, of_run: bool = False, gone: bool = False, cursor: int | None = None, limit: int = 100,
) -> Page:  # fmt: skip
    """`of_run`: only those that are about no single checkpoint."""
    query = (
        select(findings, runs.c.target, checkpoints.c.path)
        .join(runs, runs.c.id == findings.c.run_id)
        .outerjoin(checkpoints, checkpoints.c.id == findings.c.checkpoint_id)
    )
    for column, value in (
        (findings.c.run_id, run),
        (findings.c.checkpoint_id, checkpoint),
        (findings.c.code, code),
        (findings.c.severity, severity),
    ):
        if value is not None:
            query = query.where(column == value)
    if of_run:
        query = query.where(findings.c.checkpoint_id.is_(None))
    if not gone:
        query = query.where(findings.c.gone_at.is_(None))
    return _page(connection, query, findings.c.id, cursor, limit)


def restores_page(
    connection: Connection, *, run: int | None = None, checkpoint: int | None = None, result: str | None = None,
    cursor: int | None = None, limit: int = 100,
) -> Page:  # fmt: skip
    query = (
        select(restores, checkpoints.c.path, checkpoints.c.run_id, runs.c.target)
        .join(checkpoints, checkpoints.c.id == restores.c.checkpoint_id)
        .join(runs, runs.c.id == checkpoints.c.run_id)
    )
    if run is not None:
        query = query.where(checkpoints.c.run_id == run)
    if checkpoint is not None:
        query = query.where(restores.c.checkpoint_id == checkpoint)
    if result is not None:
        query = query.where(restores.c.result == result)
    return _page(connection, query, restores.c.id, cursor, limit)


def jobs_page(
    connection: Connection, *, run: int | None = None, name: str | None = None, state: str | None = None,
    cursor: int | None = None, limit: int = 100,
) -> Page:  # fmt: skip
    query = select(jobs, runs.c.target, runs.c.name.label("run_name")).outerjoin(
        runs, runs.c.id == jobs.c.run_id
    )
    for column, value in ((jobs.c.run_id, run), (jobs.c.name, name), (jobs.c.state, state)):
        if value is not None:
            query = query.where(column == value)
    return _page(connection, query, jobs.c.id, cursor, limit)


def one_job(connection: Connection, job_id: int) -> Row | None:
    query = select(jobs, runs.c.target, runs.c.name.label("run_name")).outerjoin(
        runs, runs.c.id == jobs.c.run_id
    )
    return first(connection, query.where(jobs.c.id == job_id))


def alerts_page(
    connection: Connection, *, run: int | None = None, state: str | None = None, severity: str | None = None,
    cursor: int | None = None, limit: int = 100,
) -> Page:  # fmt: skip
    query = (
        select(alerts, runs.c.target, runs.c.name.label("run_name"), runs.c.work_at_risk, checkpoints.c.path)
        .join(runs, runs.c.id == alerts.c.run_id)
        .outerjoin(checkpoints, checkpoints.c.id == alerts.c.checkpoint_id)
    )
    for column, value in ((alerts.c.run_id, run), (alerts.c.state, state), (alerts.c.severity, severity)):
        if value is not None:
            query = query.where(column == value)
    return _page(connection, query, alerts.c.id, cursor, limit)


def scrub_state(connection: Connection, run_id: int, fresh_since: float) -> Mapping[str, Any]:
    """Bytes of the kept checkpoints of a run, how many of them were read since a time, and the oldest reading."""
    query = (
        select(
            func.coalesce(func.sum(files.c.size), 0).label("total"),
            func.coalesce(func.sum(case((files.c.read_at >= fresh_since, files.c.size), else_=0)), 0).label(
                "fresh"
            ),
            func.min(files.c.read_at).label("oldest"),
        )
        .join(checkpoints, checkpoints.c.id == files.c.checkpoint_id)
        .where(checkpoints.c.run_id == run_id, checkpoints.c.gone_at.is_(None))
    )
    return rows(connection, query)[0]

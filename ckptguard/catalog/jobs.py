"""The queue of jobs, and the record of every run of one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from ckptguard.catalog._rows import Row, first, insert_one, rows
from ckptguard.catalog.tables import jobs

OPEN = ("queued", "running")


def enqueue(
    connection: Connection,
    name: str,
    *,
    now: float,
    run_id: int | None = None,
    checkpoint_id: int | None = None,
    origin: str = "schedule",
    priority: int = 0,
) -> int:
    """Queue a job. The same one that waits already is not queued twice: missed runs never pile up."""
    same = [
        jobs.c.name == name,
        jobs.c.state == "queued",
        jobs.c.run_id.is_(None) if run_id is None else jobs.c.run_id == run_id,
        jobs.c.checkpoint_id.is_(None) if checkpoint_id is None else jobs.c.checkpoint_id == checkpoint_id,
    ]
    waiting = connection.execute(select(jobs.c.id, jobs.c.priority).where(*same)).first()
    if waiting is not None:
        if waiting.priority < priority:
            connection.execute(update(jobs).where(jobs.c.id == waiting.id).values(priority=priority))
        return int(waiting.id)
    return insert_one(
        connection,
        insert(jobs).values(
            name=name,
            run_id=run_id,
            checkpoint_id=checkpoint_id,
            origin=origin,
            state="queued",
            priority=priority,
            queued_at=now,
        ),
    )


def claim(connection: Connection, now: float, *, without: Collection[str] = ()) -> Row | None:
    """Take the next job: highest priority, then oldest. No two jobs of one name work on the same run at a time."""
    busy = select(jobs.c.name, jobs.c.run_id).where(jobs.c.state == "running")
    taken = {(row.name, row.run_id) for row in connection.execute(busy).all()}
    query = (
        select(jobs)
        .where(jobs.c.state == "queued")
        .order_by(jobs.c.priority.desc(), jobs.c.id)
        .limit(50 + len(taken))
    )
    if without:
        query = query.where(jobs.c.name.not_in(list(without)))
    for row in rows(connection, query):
        if (row["name"], row["run_id"]) in taken:
            continue
        won = connection.execute(
            update(jobs)
            .where(jobs.c.id == row["id"], jobs.c.state == "queued")
            .values(state="running", started_at=now)
        )
        if won.rowcount == 1:
            return row
    return None


def progress(connection: Connection, job_id: int, share: float | None, doing: str, log: str) -> bool:
    """Note how far a job is. Returns whether somebody asked to cancel it."""
    connection.execute(
        update(jobs).where(jobs.c.id == job_id).values(progress=share, doing=doing[:500], log=log)
    )
    return bool(connection.execute(select(jobs.c.cancel).where(jobs.c.id == job_id)).scalar())


def finish(connection: Connection, job_id: int, state: str, result: str, log: str, now: float) -> None:
    connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id)
        .values(state=state, result=result[:2000], log=log, ended_at=now, doing="", progress=None)
    )


def cancel(connection: Connection, job_id: int, now: float) -> str | None:
    """Ask a job to stop: one that waits never begins. Returns its state before, None when there is no such job."""
    state = connection.execute(select(jobs.c.state).where(jobs.c.id == job_id)).scalar()
    if state == "queued":
        connection.execute(
            update(jobs)
            .where(jobs.c.id == job_id)
            .values(state="cancelled", cancel=True, ended_at=now, result="cancelled before it began")
        )
    elif state == "running":
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(cancel=True))
    return str(state) if state is not None else None


def give_back(connection: Connection, row: Mapping[str, Any], now: float) -> None:
    """A job whose end is not known is marked so and queued again, unless it was to be cancelled."""
    current = first(connection, select(jobs).where(jobs.c.id == row["id"]))
    if current is None or current["state"] != "running":
        return
    finish(connection, row["id"], "interrupted", "interrupted; queued again", current["log"], now)
    if not current["cancel"]:
        enqueue(
            connection,
            row["name"],
            now=now,
            run_id=row["run_id"],
            checkpoint_id=row["checkpoint_id"],
            origin="recovery",
            priority=row["priority"],
        )


def recover(connection: Connection, now: float) -> int:
    """After a start: what was running when the service died is marked so, and queued again."""
    broken = rows(connection, select(jobs).where(jobs.c.state == "running"))
    for row in broken:
        give_back(connection, row, now)
    return len(broken)


def last_started(connection: Connection) -> dict[tuple[str, int | None], float]:
    """When each job of each run was started last, or was queued and waits since; by name and run."""
    query = select(
        jobs.c.name, jobs.c.run_id, func.max(func.coalesce(jobs.c.started_at, jobs.c.queued_at))
    ).group_by(jobs.c.name, jobs.c.run_id)
    return {(row[0], row[1]): float(row[2]) for row in connection.execute(query).all()}


def newest(connection: Connection, name: str, run_id: int) -> Row | None:
    """The last job of a name for a run, in whatever state."""
    query = select(jobs).where(jobs.c.name == name, jobs.c.run_id == run_id)
    return first(connection, query.order_by(jobs.c.id.desc()).limit(1))

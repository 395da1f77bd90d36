"""The checkpoints of a run, their phases and the time line of what happened to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert, select, update

from ckptguard.catalog._rows import Row, first, insert_one, rows
from ckptguard.catalog.tables import checkpoints, events, findings, saves


def of_run(connection: Connection, run_id: int, *, gone: bool = False) -> list[Row]:
    """The checkpoints that are there (all that ever were, with `gone`), oldest step first."""
    query = select(checkpoints).where(checkpoints.c.run_id == run_id)
    if not gone:
        query = query.where(checkpoints.c.gone_at.is_(None))
    return rows(connection, query.order_by(checkpoints.c.step, checkpoints.c.id))


def at_path(connection: Connection, run_id: int, path: str) -> Row | None:
    """The checkpoint of a run at a path, there or gone."""
    return first(
        connection, select(checkpoints).where(checkpoints.c.run_id == run_id, checkpoints.c.path == path)
    )


def put_checkpoint(connection: Connection, run_id: int, path: str, values: Mapping[str, Any]) -> int:
    """Insert a checkpoint, or update the one of that path. Returns its id."""
    found = connection.execute(
        select(checkpoints.c.id).where(checkpoints.c.run_id == run_id, checkpoints.c.path == path)
    ).scalar()
    if found is None:
        return insert_one(connection, insert(checkpoints).values(run_id=run_id, path=path, **values))
    connection.execute(update(checkpoints).where(checkpoints.c.id == found).values(**values))
    return int(found)


def unjudged(connection: Connection, changed_before: float) -> list[Row]:
    """The complete checkpoints of all runs that have no verdict on their bytes, though these lie still since that time."""
    query = select(checkpoints).where(
        checkpoints.c.gone_at.is_(None),
        checkpoints.c.phase == "complete",
        checkpoints.c.judged_fingerprint != checkpoints.c.fingerprint,
        checkpoints.c.changed_at <= changed_before,
    )
    return rows(connection, query)


def unread(connection: Connection, run_id: int | None = None) -> list[Row]:
    """The complete checkpoints (of one run) that nothing but a read that failed kept from a verdict."""
    holds = select(findings.c.checkpoint_id).where(
        findings.c.gone_at.is_(None),
        findings.c.code.in_(("unreadable", "unstable-read")),
        findings.c.source == "audit",
    )
    query = select(checkpoints).where(
        checkpoints.c.gone_at.is_(None),
        checkpoints.c.phase == "complete",
        checkpoints.c.resume == "unknown",
        checkpoints.c.judged_at.is_not(None),
        checkpoints.c.id.in_(holds),
    )
    if run_id is not None:
        query = query.where(checkpoints.c.run_id == run_id)
    return rows(connection, query)


def set_checkpoint(connection: Connection, checkpoint_id: int, **values: Any) -> None:
    connection.execute(update(checkpoints).where(checkpoints.c.id == checkpoint_id).values(**values))


def add_event(
    connection: Connection, run_id: int, checkpoint_id: int | None, at: float, what: str, detail: str = ""
) -> None:
    connection.execute(
        insert(events).values(run_id=run_id, checkpoint_id=checkpoint_id, at=at, what=what, detail=detail)
    )


def add_save(connection: Connection, **values: Any) -> None:
    connection.execute(insert(saves).values(**values))


def recent_saves(connection: Connection, run_id: int, limit: int = 200) -> list[Row]:
    """The last completed saves of a run with the path of each, oldest first."""
    query = (
        select(saves, checkpoints.c.path)
        .join(checkpoints, checkpoints.c.id == saves.c.checkpoint_id)
        .where(saves.c.run_id == run_id)
        .order_by(saves.c.completed.desc(), saves.c.id.desc())
        .limit(limit)
    )
    return list(reversed(rows(connection, query)))


def set_blocked(connection: Connection, run_id: int, step: int, seconds: float) -> None:
    """How long the training stood still for the save of a step."""
    newest = (
        select(saves.c.id)
        .where(saves.c.run_id == run_id, saves.c.step == step)
        .order_by(saves.c.id.desc())
        .limit(1)
    )
    connection.execute(update(saves).where(saves.c.id == newest.scalar_subquery()).values(blocked=seconds))

"""The runs under watch, and what is true of each now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, insert, select, update

from ckptguard.catalog._rows import Row, first, insert_one, rows
from ckptguard.catalog.tables import runs


def ensure_run(
    connection: Connection, target: str, *, name: str, now: float, total_steps: int | None, gpus: int | None
) -> int:
    """The id of a run, made when it is seen first; what the configuration says of it is brought up to date."""
    told: dict[str, Any] = {"name": name, "watched": True, "gpus": gpus}
    if total_steps is not None:
        told["total_steps"] = total_steps
    found = connection.execute(select(runs.c.id).where(runs.c.target == target)).scalar()
    if found is not None:
        connection.execute(update(runs).where(runs.c.id == found).values(**told))
        return int(found)
    return insert_one(connection, insert(runs).values(target=target, first_seen=now, **told))


def watch_only(connection: Connection, ids: Sequence[int]) -> None:
    """Runs that the configuration does not name any more keep their history and are not watched."""
    connection.execute(update(runs).where(runs.c.id.not_in(list(ids))).values(watched=False))


def set_run(connection: Connection, run_id: int, **values: Any) -> None:
    connection.execute(update(runs).where(runs.c.id == run_id).values(**values))


def get_run(connection: Connection, run_id: int) -> Row | None:
    return first(connection, select(runs).where(runs.c.id == run_id))


def find_run(connection: Connection, text: str) -> Row | None:
    """A run by its target, its name, or its number."""
    for condition in (runs.c.target == text, runs.c.target == text.rstrip("/"), runs.c.name == text):
        found = first(connection, select(runs).where(condition).order_by(runs.c.id.desc()))
        if found is not None:
            return found
    return get_run(connection, int(text)) if text.isdecimal() and len(text) < 18 else None


def watched_runs(connection: Connection) -> list[Row]:
    return rows(connection, select(runs).where(runs.c.watched).order_by(runs.c.id))

"""What was read of the metric logs: where reading goes on, the attempts, and a curve of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from ckptguard.catalog._rows import Row, rows
from ckptguard.catalog.tables import anomalies, attempts, logs, metrics

MOST_ROWS = 4000
"""A curve on a page has no use for more; half of them go when there are twice as many."""


def positions(connection: Connection, run_id: int) -> dict[str, Row]:
    """The logs of a run by file."""
    query = select(logs).where(logs.c.run_id == run_id)
    return {row["file"]: row for row in rows(connection, query)}


def put_position(connection: Connection, run_id: int, file: str, values: Mapping[str, Any]) -> None:
    where = (logs.c.run_id == run_id, logs.c.file == file)
    done = connection.execute(update(logs).where(*where).values(**values))
    if done.rowcount == 0:
        connection.execute(insert(logs).values(run_id=run_id, file=file, **values))


def add_metrics(connection: Connection, run_id: int, new: Sequence[Mapping[str, Any]]) -> None:
    """Append to the curve. An attempt that went back replaces nothing: both lines are the history."""
    if not new:
        return
    connection.execute(insert(metrics), [{**row, "run_id": run_id} for row in new])
    count = connection.execute(select(func.count()).where(metrics.c.run_id == run_id)).scalar() or 0
    if count > 2 * MOST_ROWS:
        ids = [
            row.id
            for row in connection.execute(
                select(metrics.c.id).where(metrics.c.run_id == run_id).order_by(metrics.c.id)
            )
        ]
        # What is odd is kept: a curve without its NaN would lie.
        odd = set(
            connection.execute(
                select(metrics.c.id).where(metrics.c.run_id == run_id, metrics.c.loss.is_(None))
            ).scalars()
        )
        unwanted = [id for place, id in enumerate(ids) if place % 2 and id not in odd]
        for start in range(0, len(unwanted), 500):
            connection.execute(delete(metrics).where(metrics.c.id.in_(unwanted[start : start + 500])))


def finite(value: float | None) -> float | None:
    """A number that every database can hold; NaN and infinity are kept as nothing, and as an anomaly."""
    return value if value is not None and math.isfinite(value) else None


def curve(connection: Connection, run_id: int) -> list[Row]:
    query = select(metrics).where(metrics.c.run_id == run_id).order_by(metrics.c.id)
    return rows(connection, query)


def put_attempt(
    connection: Connection, run_id: int, number: int, *, step: int, first_at: float | None, at: float | None
) -> None:
    """An attempt reached a step at a time."""
    where = (attempts.c.run_id == run_id, attempts.c.number == number)
    known = connection.execute(select(attempts).where(*where)).first()
    if known is None:
        connection.execute(
            insert(attempts).values(
                run_id=run_id, number=number, first_step=step, last_step=step, started=first_at, ended=at
            )
        )
    elif step > (known.last_step or 0) or at != known.ended:
        connection.execute(
            update(attempts).where(*where).values(last_step=max(step, known.last_step or 0), ended=at)
        )


def sync_anomalies(
    connection: Connection, run_id: int, source: Iterable[str], seen: Iterable[Mapping[str, Any]], now: float
) -> None:
    """Bring the open anomalies of these codes to what is seen now; the same code and first step is the same one."""
    codes = list(source)
    query = select(anomalies).where(
        anomalies.c.run_id == run_id, anomalies.c.code.in_(codes), anomalies.c.gone_at.is_(None)
    )
    known = {(row.code, row.first_step, row.scope): row for row in connection.execute(query).all()}
    still = set()
    for one in seen:
        key = (one["code"], one["first_step"], one["scope"])
        still.add(key)
        if key not in known:
            connection.execute(insert(anomalies).values(run_id=run_id, first_seen=now, **one))
        elif known[key].severity != one["severity"] or known[key].evidence != one["evidence"]:
            connection.execute(
                update(anomalies)
                .where(anomalies.c.id == known[key].id)
                .values(severity=one["severity"], evidence=one["evidence"], last_step=one["last_step"])
            )
    for key, row in known.items():
        if key not in still:
            connection.execute(update(anomalies).where(anomalies.c.id == row.id).values(gone_at=now))


def open_anomalies(connection: Connection, run_id: int) -> list[Row]:
    query = select(anomalies).where(anomalies.c.run_id == run_id, anomalies.c.gone_at.is_(None))
    return rows(connection, query.order_by(anomalies.c.id))

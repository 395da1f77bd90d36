"""Alerts, and the outbox that brings each to its sinks: written in one transaction with what caused them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from ckptguard.catalog._rows import Row, insert_one, rows
from ckptguard.catalog.tables import alerts, checkpoints, outbox
from ckptguard.catalog.troubles import Act, Decision, Standing, Trouble, document
from ckptguard.model import Severity
from ckptguard.units import timestamp


def standing(connection: Connection, run_id: int) -> list[Standing]:
    """The alerts of a run that fire."""
    query = select(alerts).where(alerts.c.run_id == run_id, alerts.c.state == "firing")
    return [
        Standing(row.id, row.key, row.code, Severity(row.severity), row.first_seen, row.said_at)
        for row in connection.execute(query).all()
    ]


def apply(
    connection: Connection, decisions: Sequence[Decision], now: float, *,
    sinks: Callable[[Severity, str], Sequence[str]], work_at_risk: Mapping[str, Any] | None,
    url: Callable[[int | None, int | None], str | None], target: str,
) -> int:  # fmt: skip
    """Carry decisions out: alert rows and one outbox row for every sink that they are routed to. Returns how many were said."""
    said = 0
    for decision in decisions:
        alert_id, trouble, state, first_seen = _carry_out(connection, decision, now, target)
        if decision.act is Act.ABSORB or trouble is None:
            continue
        body = document(
            trouble,
            state=state,
            first_seen=timestamp(first_seen),
            work_at_risk=work_at_risk,
            url=url(trouble.run_id, trouble.checkpoint_id),
        )
        # An alert that was sent while loud must be resolved where it was sent, so routes go by the alert's severity.
        for sink in sinks(trouble.severity, trouble.code):
            connection.execute(
                insert(outbox).values(alert_id=alert_id, sink=sink, document=body, created_at=now, due_at=now)
            )
            said += 1
    return said


def _carry_out(
    connection: Connection, decision: Decision, now: float, target: str
) -> tuple[int, Trouble | None, str, float]:
    trouble, before = decision.trouble, decision.standing
    if decision.act is Act.FIRE:
        assert trouble is not None
        made = insert_one(
            connection,
            insert(alerts).values(
                key=trouble.key,
                run_id=trouble.run_id,
                checkpoint_id=trouble.checkpoint_id,
                state="firing",
                first_seen=trouble.since,
                said_at=now,
                **_told(trouble),
            ),
        )
        return made, trouble, "firing", trouble.since
    assert before is not None
    where = alerts.c.id == before.id
    if decision.act in (Act.CHANGE, Act.REMIND):
        assert trouble is not None
        connection.execute(update(alerts).where(where).values(said_at=now, **_told(trouble)))
        return before.id, trouble, "firing", before.first_seen
    row = connection.execute(
        select(alerts, checkpoints.c.path)
        .outerjoin(checkpoints, checkpoints.c.id == alerts.c.checkpoint_id)
        .where(where)
    ).one()
    connection.execute(update(alerts).where(where).values(state="resolved", resolved_at=now))
    healed = Trouble(
        key=row.key,
        run=target,
        run_id=row.run_id,
        code=row.code,
        severity=Severity(row.severity),
        title=row.title,
        message=row.message,
        hint=row.hint,
        since=row.first_seen,
        checkpoint=f"{target}/{row.path}" if row.path else (target if row.path == "" else None),
        checkpoint_id=row.checkpoint_id,
    )
    return before.id, healed, "resolved", row.first_seen


def _told(trouble: Trouble) -> dict[str, Any]:
    return {
        "code": trouble.code,
        "severity": str(trouble.severity),
        "title": trouble.title,
        "message": trouble.message,
        "hint": trouble.hint,
    }


# --- delivery -----------------------------------------------------------------------------------------


def due(connection: Connection, sink: str, now: float, limit: int = 50) -> list[Row]:
    """What a sink is to be sent now, oldest first. One that failed holds nothing else of its sink back for long."""
    query = (
        select(outbox)
        .where(
            outbox.c.sink == sink,
            outbox.c.sent_at.is_(None),
            outbox.c.dropped_at.is_(None),
            outbox.c.due_at <= now,
        )
        .order_by(outbox.c.id)
        .limit(limit)
    )
    return rows(connection, query)


def mark_sent(connection: Connection, outbox_id: int, now: float) -> None:
    connection.execute(
        update(outbox)
        .where(outbox.c.id == outbox_id)
        .values(sent_at=now, tries=outbox.c.tries + 1, error=None)
    )


def mark_failed(connection: Connection, outbox_id: int, error: str, due_at: float) -> None:
    connection.execute(
        update(outbox)
        .where(outbox.c.id == outbox_id)
        .values(tries=outbox.c.tries + 1, error=error[:500], due_at=due_at)
    )


def drop_unknown(connection: Connection, sinks: Sequence[str], now: float) -> int:
    """Give up what waits for sinks that the configuration does not have any more."""
    gone = connection.execute(
        update(outbox)
        .where(outbox.c.sent_at.is_(None), outbox.c.dropped_at.is_(None), outbox.c.sink.not_in(list(sinks)))
        .values(dropped_at=now, error="this sink is not configured any more")
    )
    return int(gone.rowcount)


def pending(connection: Connection) -> dict[str, tuple[int, float, str | None]]:
    """For every sink with undelivered alerts: how many, since when, and the last error."""
    query = (
        select(outbox.c.sink, func.count(), func.min(outbox.c.created_at), func.max(outbox.c.error))
        .where(outbox.c.sent_at.is_(None), outbox.c.dropped_at.is_(None))
        .group_by(outbox.c.sink)
    )
    return {row[0]: (int(row[1]), float(row[2]), row[3]) for row in connection.execute(query).all()}

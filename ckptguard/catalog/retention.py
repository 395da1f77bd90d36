"""Forgets what is old. The newest verdict of each checkpoint, and everything of what is there, stays."""

from __future__ import annotations

from sqlalchemy import Connection, Table, delete, func, select

from ckptguard.catalog.tables import (
    alerts,
    events,
    files,
    findings,
    jobs,
    outbox,
    restores,
    tensors,
    verdicts,
)
from ckptguard.catalog.tables import checkpoints as known


def forget(connection: Connection, before: float) -> dict[str, int]:
    """Delete history older than a time; returns how many rows of each table went."""
    gone: dict[str, int] = {}

    def remove(table: Table, *where: object) -> None:
        gone[table.name] = int(connection.execute(delete(table).where(*where)).rowcount)  # type: ignore[arg-type]

    newest_verdicts = select(func.max(verdicts.c.id)).group_by(verdicts.c.checkpoint_id)
    remove(verdicts, verdicts.c.at < before, verdicts.c.id.not_in(newest_verdicts))
    newest_restores = select(func.max(restores.c.id)).group_by(restores.c.checkpoint_id)
    remove(restores, restores.c.at < before, restores.c.id.not_in(newest_restores))
    remove(findings, findings.c.gone_at < before)
    remove(events, events.c.at < before)
    remove(jobs, jobs.c.ended_at < before)
    remove(outbox, outbox.c.sent_at < before)
    remove(alerts, alerts.c.state == "resolved", alerts.c.resolved_at < before)
    rotated = select(known.c.id).where(known.c.gone_at < before)
    remove(files, files.c.checkpoint_id.in_(rotated))
    remove(tensors, tensors.c.checkpoint_id.in_(rotated))
    return gone

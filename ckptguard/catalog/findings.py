"""Findings over time: each holds from when it was first seen until a look of the same source sees it no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, insert, select, update

from ckptguard.catalog._rows import Row, rows
from ckptguard.catalog.tables import findings


def sync_findings(
    connection: Connection,
    run_id: int,
    checkpoint_id: int | None,
    source: str,
    seen: Iterable[Mapping[str, Any]],
    now: float,
) -> tuple[int, int]:
    """Bring the open findings of one source to what it sees now. Returns how many are new and how many are gone.

    The same code on the same subject is the same finding: its message may change with the numbers in it.
    """
    where = [
        findings.c.run_id == run_id,
        findings.c.source == source,
        findings.c.gone_at.is_(None),
        findings.c.checkpoint_id.is_(None)
        if checkpoint_id is None
        else findings.c.checkpoint_id == checkpoint_id,
    ]
    open_now = {
        (row.code, row.subject): row for row in connection.execute(select(findings).where(*where)).all()
    }
    fresh: list[dict[str, Any]] = []
    still: set[tuple[str, str]] = set()
    for one in seen:
        key = (str(one["code"]), str(one["subject"]))
        if key in still:
            continue
        still.add(key)
        told = {name: str(one[name]) for name in ("severity", "effect", "message", "hint")}
        before = open_now.get(key)
        if before is None:
            fresh.append(
                {
                    "run_id": run_id,
                    "checkpoint_id": checkpoint_id,
                    "source": source,
                    "code": key[0],
                    "subject": key[1],
                    "first_seen": now,
                    "last_seen": now,
                    **told,
                }
            )
        elif any(getattr(before, name) != value for name, value in told.items()):
            connection.execute(
                update(findings).where(findings.c.id == before.id).values(last_seen=now, **told)
            )
    if fresh:
        connection.execute(insert(findings), fresh)
    ended = [row.id for key, row in open_now.items() if key not in still]
    if ended:
        connection.execute(update(findings).where(findings.c.id.in_(ended)).values(gone_at=now))
    return len(fresh), len(ended)


def close_checkpoint(connection: Connection, checkpoint_id: int, now: float) -> None:
    """A checkpoint that is gone has no trouble any more."""
    connection.execute(
        update(findings)
        .where(findings.c.checkpoint_id == checkpoint_id, findings.c.gone_at.is_(None))
        .values(gone_at=now)
    )


def open_findings(connection: Connection, checkpoint_id: int, source: str) -> list[Row]:
    """What one source says of a checkpoint now."""
    query = select(findings).where(
        findings.c.checkpoint_id == checkpoint_id, findings.c.source == source, findings.c.gone_at.is_(None)
    )
    return rows(connection, query)

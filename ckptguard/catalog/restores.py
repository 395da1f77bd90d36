"""Restore validations and copies of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert, select, update

from ckptguard.catalog._rows import Row, rows
from ckptguard.catalog.checkpoints import add_event, set_checkpoint
from ckptguard.catalog.findings import sync_findings
from ckptguard.catalog.tables import checkpoints, restores, uploads
from ckptguard.model import Evidence, Resume


def record_restore(
    connection: Connection,
    run_id: int,
    checkpoint_id: int,
    document: Mapping[str, Any],
    *,
    now: float,
    took: float,
) -> None:
    """Keep a document of `restore`. A proof raises the evidence; a failure makes the checkpoint unsafe."""
    result = str(document["result"])
    connection.execute(
        insert(restores).values(
            checkpoint_id=checkpoint_id,
            at=now,
            result=result,
            evidence=document["evidence"],
            bitwise=document.get("bitwise"),
            device=str(document.get("device") or ""),
            seconds=took,
            document=document,
        )
    )
    values: dict[str, Any] = {"restored_at": now, "restored_result": result}
    before: str = connection.execute(
        select(checkpoints.c.evidence).where(checkpoints.c.id == checkpoint_id)
    ).scalar_one()
    if result == "continuous":
        values["evidence"] = str(max(Evidence(before), Evidence(document["evidence"]), key=lambda e: e.rank))
    elif result in ("diverged", "failed"):
        values |= {"resume": str(Resume.UNSAFE), "as_complete": False}
    set_checkpoint(connection, checkpoint_id, **values)
    sync_findings(connection, run_id, checkpoint_id, "restore", document.get("findings", ()), now)
    add_event(connection, run_id, checkpoint_id, now, "restored", result)


def put_upload(
    connection: Connection, checkpoint_id: int, destination: str, values: Mapping[str, Any]
) -> None:
    where = (uploads.c.checkpoint_id == checkpoint_id, uploads.c.destination == destination)
    done = connection.execute(update(uploads).where(*where).values(**values))
    if done.rowcount == 0:
        connection.execute(
            insert(uploads).values(checkpoint_id=checkpoint_id, destination=destination, **values)
        )


def uploads_of_run(connection: Connection, run_id: int) -> list[Row]:
    """The copies of all checkpoints of a run."""
    query = (
        select(uploads, checkpoints.c.path, checkpoints.c.step, checkpoints.c.completed_at)
        .join(checkpoints, checkpoints.c.id == uploads.c.checkpoint_id)
        .where(checkpoints.c.run_id == run_id)
        .order_by(uploads.c.id)
    )
    return rows(connection, query)

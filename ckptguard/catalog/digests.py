"""What the bytes of each checkpoint were when they were first read: rot shows later even where nobody sealed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from ckptguard.catalog._rows import Row, rows
from ckptguard.catalog.tables import checkpoints, files, tensors


def remember_files(
    connection: Connection, checkpoint_id: int, seen: Sequence[Mapping[str, Any]], now: float
) -> None:
    """Keep the digests of files at first sight; of a file with another size, time or tag, the new ones.

    Digests of an unchanged file are never replaced: they are what later looks are compared with.
    """
    known = {row.name: row for row in connection.execute(_of(checkpoint_id)).all()}
    for file in seen:
        before = known.get(file["name"])
        same = before is not None and (before.size, before.modified, before.etag) == (
            file["size"],
            file["modified"],
            file.get("etag"),
        )
        if same and before is not None:
            if tuple(before.blocks) == tuple(file["blocks"]):
                connection.execute(update(files).where(files.c.id == before.id).values(read_at=now))
            continue
        if before is not None:
            connection.execute(delete(files).where(files.c.id == before.id))
        connection.execute(
            insert(files).values(
                checkpoint_id=checkpoint_id,
                name=file["name"],
                size=file["size"],
                modified=file["modified"],
                etag=file.get("etag"),
                block_size=file["block_size"],
                blocks=list(file["blocks"]),
                first_seen=now,
                read_at=now,
            )
        )
    gone = [row.id for name, row in known.items() if name not in {f["name"] for f in seen}]
    if gone and seen:
        connection.execute(delete(files).where(files.c.id.in_(gone)))


def _of(checkpoint_id: int) -> Any:
    return select(files).where(files.c.checkpoint_id == checkpoint_id).order_by(files.c.name)


def remembered_files(connection: Connection, checkpoint_id: int) -> list[Row]:
    return rows(connection, _of(checkpoint_id))


def remember_tensors(connection: Connection, checkpoint_id: int, seen: Sequence[Mapping[str, Any]]) -> None:
    """The tensors of a checkpoint as they were read last."""
    connection.execute(delete(tensors).where(tensors.c.checkpoint_id == checkpoint_id))
    if seen:
        connection.execute(insert(tensors), [{**one, "checkpoint_id": checkpoint_id} for one in seen])


def kept_files(connection: Connection, run_id: int | None = None) -> list[Row]:
    """Every remembered file of the checkpoints that are there, without its digests; least recently read first."""
    query = (
        select(
            files.c.id,
            files.c.checkpoint_id,
            files.c.name,
            files.c.size,
            files.c.read_at,
            checkpoints.c.run_id,
            checkpoints.c.path,
        )
        .join(checkpoints, checkpoints.c.id == files.c.checkpoint_id)
        .where(checkpoints.c.gone_at.is_(None), checkpoints.c.phase == "complete")
        .order_by(files.c.read_at, files.c.id)
    )
    if run_id is not None:
        query = query.where(checkpoints.c.run_id == run_id)
    return rows(connection, query)


def file_was_read(connection: Connection, file_id: int, now: float) -> None:
    connection.execute(update(files).where(files.c.id == file_id).values(read_at=now))

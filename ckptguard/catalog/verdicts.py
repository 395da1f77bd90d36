"""Verdicts: appended as the contract's documents; the checkpoint's own row says what the newest one says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert, select

from ckptguard.catalog._rows import Row, rows
from ckptguard.catalog.checkpoints import add_event, set_checkpoint
from ckptguard.catalog.findings import sync_findings
from ckptguard.catalog.tables import checkpoints, verdicts
from ckptguard.model import Effect, Evidence, Resume, Severity


def as_complete(document: Mapping[str, Any]) -> bool:
    """Exact, or lossy in nothing but what the run is configured not to save."""
    if document["resume"] == Resume.EXACT:
        return True
    return document["resume"] == Resume.LOSSY and not any(
        f["effect"] == Effect.LOSSY and f["severity"] != Severity.INFO for f in document["findings"]
    )


def record_verdict(
    connection: Connection,
    run_id: int,
    checkpoint_id: int,
    document: Mapping[str, Any],
    fingerprint: str,
    now: float,
) -> None:
    """Keep one checkpoint's document of `audit`, for the files that had this fingerprint.

    A shallower look at unchanged files proves nothing against a deeper one before it: it is kept in the history only.
    """
    before = connection.execute(select(checkpoints).where(checkpoints.c.id == checkpoint_id)).mappings().one()
    connection.execute(
        insert(verdicts).values(
            checkpoint_id=checkpoint_id,
            at=now,
            resume=document["resume"],
            evidence=document["evidence"],
            fingerprint=fingerprint,
            document=document,
        )
    )
    evidence = Evidence(document["evidence"])
    deeper_before = before["judged_fingerprint"] == fingerprint and _audited(before["evidence"]) > evidence
    if document["resume"] == Resume.WRITING or deeper_before:
        return
    same = before["judged_fingerprint"] == fingerprint
    restored = (
        Evidence(before["evidence"]) if same and before["restored_result"] == "continuous" else evidence
    )
    resume = str(document["resume"])
    if same and before["restored_result"] in ("diverged", "failed"):
        # What a restore has shown to be wrong does not become right by a look at the same bytes.
        resume = Resume.UNSAFE
    values: dict[str, Any] = {
        "layout": document["layout"],
        "step": document["step"] if document["step"] is not None else before["step"],
        "resume": resume,
        "evidence": str(max(evidence, restored, key=lambda e: e.rank)),
        "as_complete": as_complete(document) and resume != Resume.UNSAFE,
        "judged_at": now,
        "judged_fingerprint": fingerprint,
        "components": document["components"],
        "gaps": document["gaps"],
        "coverage": document["coverage"],
        "health": document["health"],
        "bytes": document["bytes"],
        "files": document["files"],
    }
    if evidence >= Evidence.CONTENT:
        values["proven_at"] = now
    set_checkpoint(connection, checkpoint_id, **values)
    sync_findings(connection, run_id, checkpoint_id, "audit", document["findings"], now)
    if not same or before["resume"] != resume:
        what = "verified" if Resume(resume).safe else resume
        add_event(connection, run_id, checkpoint_id, now, what, f"{resume} at {evidence}")


def _audited(evidence: str) -> Evidence:
    """The depth of the audit behind a checkpoint's evidence: restores are proofs of another kind."""
    return min(Evidence(evidence), Evidence.CONTENT, key=lambda e: e.rank)


def history(connection: Connection, checkpoint_id: int, limit: int = 50) -> list[Row]:
    """The verdicts on a checkpoint, newest first."""
    query = (
        select(verdicts)
        .where(verdicts.c.checkpoint_id == checkpoint_id)
        .order_by(verdicts.c.at.desc(), verdicts.c.id.desc())
        .limit(limit)
    )
    return rows(connection, query)

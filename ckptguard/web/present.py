"""Pure: rows of the catalog as the documents of the API. Field names are the contract's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptguard.jobs.hints import meant
from ckptguard.units import timestamp

Row = Mapping[str, Any]


def full_path(target: str, path: str | None) -> str | None:
    """The path of a checkpoint as commands take it."""
    if path is None:
        return None
    return f"{target.rstrip('/')}/{path}" if path else target


def run(row: Row) -> dict[str, Any]:
    return {
        "id": row["id"],
        "target": row["target"],
        "name": row["name"],
        "state": row["state"],
        "state_since": timestamp(row["state_since"]),
        "state_reason": row["state_reason"],
        "step": row["step"],
        "total_steps": row["total_steps"],
        "latest": full_path(row["target"], row["latest"]),
        "newest_safe": full_path(row["target"], row["newest_safe"]),
        "resume_from": full_path(row["target"], row["resume_from"]),
        "work_at_risk": row["work_at_risk"],
        "checkpoints": row["counts"],
        "alerts": row["alerts"],
        "looked_at": timestamp(row["looked_at"]),
        "error": row["error"],
    }


def checkpoint(row: Row) -> dict[str, Any]:
    current = row["judged_fingerprint"] == row["fingerprint"]
    writing = row["phase"] in ("started", "growing", "stalled")
    return {
        "id": row["id"],
        "run": row["run_id"],
        "path": full_path(row["target"], row["path"]),
        "layout": row["layout"],
        "step": row["step"],
        "resume": "writing" if writing else row["resume"] if current else "unknown",
        "evidence": row["evidence"] if current else "listing",
        "phase": row["phase"],
        "files": row["files"],
        "bytes": row["bytes"],
        "components": row["components"] or {},
        "gaps": row["gaps"] or [],
        "coverage": row["coverage"] or {},
        "health": row["health"] or {},
        "sealed": row["sealed"],
        "first_seen": timestamp(row["first_seen"]),
        "completed": timestamp(row["completed_at"]),
        "judged": timestamp(row["judged_at"]),
        "restored": timestamp(row["restored_at"]),
        "restored_result": row["restored_result"],
        "gone": timestamp(row["gone_at"]),
    }


def finding(row: Row) -> dict[str, Any]:
    checkpoint = full_path(row["target"], row["path"]) if row["checkpoint_id"] is not None else None
    return {
        "id": row["id"],
        "run": row["run_id"],
        "checkpoint_id": row["checkpoint_id"],
        "checkpoint": checkpoint,
        "code": row["code"],
        "severity": row["severity"],
        "effect": row["effect"],
        "subject": row["subject"],
        "message": row["message"],
        "hint": meant(row["hint"], row["target"], checkpoint),
        "first_seen": timestamp(row["first_seen"]),
        "gone": timestamp(row["gone_at"]),
    }


def restore(row: Row) -> dict[str, Any]:
    """The document of `restore` as it was, with what the catalog adds."""
    return {
        **row["document"],
        "id": row["id"],
        "run": row["run_id"],
        "checkpoint_id": row["checkpoint_id"],
        "at": timestamp(row["at"]),
        "seconds": row["seconds"],
    }


def job(row: Row, *, log: bool = False) -> dict[str, Any]:
    body = {
        "id": row["id"],
        "name": row["name"],
        "run": row["run_id"],
        "target": row["target"],
        "origin": row["origin"],
        "state": row["state"],
        "progress": row["progress"],
        "doing": row["doing"],
        "result": row["result"],
        "queued": timestamp(row["queued_at"]),
        "started": timestamp(row["started_at"]),
        "ended": timestamp(row["ended_at"]),
        "seconds": seconds(row),
    }
    return {**body, "log": row["log"]} if log else body


def seconds(row: Row) -> float | None:
    """How long a job took, once it has ended."""
    if row["started_at"] is None or row["ended_at"] is None:
        return None
    return round(max(0.0, float(row["ended_at"]) - float(row["started_at"])), 3)


def alert(row: Row, url: str | None) -> dict[str, Any]:
    return {
        "schema": 1,
        "id": row["id"],
        "key": row["key"],
        "state": row["state"],
        "severity": row["severity"],
        "run": row["target"],
        "run_id": row["run_id"],
        "checkpoint": full_path(row["target"], row["path"]) if row["checkpoint_id"] is not None else None,
        "checkpoint_id": row["checkpoint_id"],
        "code": row["code"],
        "title": row["title"],
        "message": row["message"],
        "hint": row["hint"],
        "first_seen": timestamp(row["first_seen"]),
        "resolved": timestamp(row["resolved_at"]),
        "work_at_risk": row["work_at_risk"],
        "url": url,
    }

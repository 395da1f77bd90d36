"""The job that proves checkpoints: each new one as soon as it is complete, all again from time to time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from ckptguard.catalog import checkpoints, digests, findings
from ckptguard.catalog.runs import get_run, set_run
from ckptguard.catalog.verdicts import record_verdict
from ckptguard.digest import blocks_digest
from ckptguard.errors import CkptguardError, NothingRecognised, TargetNotFound
from ckptguard.jobs.assess import assess
from ckptguard.jobs.children import Cancelled
from ckptguard.jobs.lifecycle import Phase
from ckptguard.jobs.schedule import Candidate, by_need, due_again
from ckptguard.jobs.task import Task
from ckptguard.model import Evidence, Resume
from ckptguard.seals import SealedFile

TRIES = 3


def audit(task: Task) -> str:
    """Judge every complete checkpoint of a run that has no verdict on its present bytes; the newest first."""
    run = _run(task)
    _whole_run(task, run)
    done: list[int] = []
    failures: dict[int, int] = {}
    while True:
        row = _next(task, run["id"], failures)
        if row is None:
            break
        task.say(f"reading {row['path'] or run['target']}", None)
        if _one(task, run, row):
            done.append(row["id"])
        else:
            failures[row["id"]] = failures.get(row["id"], 0) + 1
    _whole_run(task, run)
    return f"{len(done)} checkpoints judged"


def audit_again(task: Task) -> str:
    """The periodic deep audit: known bad ones always, the others when their proof is older than the interval."""
    run = _run(task)
    settings = task.context.settings.audit
    with task.context.catalog.read() as connection:
        rows = {row["id"]: row for row in _complete(connection, run["id"])}
    candidates = [
        Candidate(row["id"], row["step"], row["completed_at"] or 0.0, Resume(row["resume"]), row["proven_at"])
        for row in rows.values()
    ]
    now = task.context.clock()
    due = due_again(candidates, now, settings.again_every * 0.9)
    bad = [c for c in by_need(candidates) if c.resume in (Resume.UNSAFE, Resume.UNKNOWN) and c not in due]
    chosen = [*bad, *due]
    for place, candidate in enumerate(chosen):
        row = rows[candidate.id]
        task.say(f"reading {row['path'] or run['target']} again", place / len(chosen))
        _one(task, run, row)
    _whole_run(task, run)
    return f"{len(chosen)} of {len(candidates)} checkpoints read again"


def _run(task: Task) -> dict[str, Any]:
    assert task.run_id is not None
    with task.context.catalog.read() as connection:
        run = get_run(connection, task.run_id)
    assert run is not None
    return run


def _complete(connection: Connection, run_id: int) -> list[dict[str, Any]]:
    return [row for row in checkpoints.of_run(connection, run_id) if row["phase"] == Phase.COMPLETE]


def _next(task: Task, run_id: int, failures: Mapping[int, int]) -> dict[str, Any] | None:
    """The newest checkpoint that is not judged as it is now, at the depth that the configuration wants."""
    depth = task.context.settings.audit.depth
    with task.context.catalog.read() as connection:
        rows = _complete(connection, run_id)
    waiting = [
        row
        for row in rows
        if (row["judged_fingerprint"] != row["fingerprint"] or Evidence(row["evidence"]) < depth)
        and failures.get(row["id"], 0) < TRIES
    ]
    return max(waiting, key=lambda r: (r["step"] if r["step"] is not None else -1, r["id"]), default=None)


def _one(task: Task, run: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Audit one checkpoint and keep its verdict. Returns whether it is judged now."""
    settings = task.context.settings.audit
    with task.context.catalog.read() as connection:
        remembered = digests.remembered_files(connection, row["id"])
    target = f"{run['target'].rstrip('/')}/{row['path']}" if row["path"] else run["target"]
    request = {
        "do": "audit",
        "target": target,
        "depth": str(settings.depth),
        "grace": 0.0,
        "max_rate": settings.max_rate,
        "remembered": {row["path"]: _seal(row["path"], remembered)} if remembered else {},
    }
    try:
        answer = _ask(task, request, row["bytes"])
    except (Cancelled, KeyboardInterrupt):
        raise
    except (TargetNotFound, NothingRecognised):
        return False
    except CkptguardError as error:
        task.log(f"{target}: {error.message}")
        return False
    return _keep(task, run, answer, only=row["path"]) > 0


def _ask(task: Task, request: Mapping[str, Any], total: int) -> dict[str, Any]:
    def progress(name: str, count: int) -> None:
        task.say(f"reading {name}", min(1.0, count / total) if total else None)

    return task.child.ask(
        request,
        timeout=task.context.settings.audit.timeout,
        progress=progress,
        cancelled=task.cancelled,
    )


def _seal(path: str, remembered: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the catalog remembers, as a seal: later looks compare with it as with any other."""
    files = {
        file["name"]: SealedFile(
            size=file["size"],
            modified=file["modified"],
            etag=file["etag"],
            digest=blocks_digest(tuple(file["blocks"])),
            blocks=tuple(file["blocks"]),
        ).model_dump(mode="json")
        for file in remembered
    }
    return {
        "schema": 1,
        "checkpoint": path,
        "created": min(file["first_seen"] for file in remembered),
        "block_size": remembered[0]["block_size"],
        "files": files,
    }


def _whole_run(task: Task, run: Mapping[str, Any]) -> None:
    """What can only be said of the run as a whole: pointers, left-overs, duplicates. Structure only."""
    request = {"do": "audit", "target": run["target"], "depth": str(Evidence.STRUCTURE), "grace": 900.0}
    try:
        answer = _ask(task, request, 0)
    except NothingRecognised:
        answer = {"reports": [], "facts": []}
    except Cancelled:
        raise
    except CkptguardError as error:
        task.log(f"{run['target']}: {error.message}")
        return
    _keep(task, run, answer, only=None)


def _keep(task: Task, run: Mapping[str, Any], answer: Mapping[str, Any], only: str | None) -> int:
    """Store what a look found: verdicts, digests, and for a look at the whole run also its own findings."""
    context = task.context
    now = context.clock()
    prints = {facts["path"]: facts for facts in answer["facts"]}
    kept = 0
    with context.catalog.write() as connection:
        rows = {row["path"]: row for row in checkpoints.of_run(connection, run["id"])}
        for report in answer["reports"]:
            if only is None:
                findings.sync_findings(connection, run["id"], None, "audit", report["findings"], now)
                set_run(connection, run["id"], latest=_relative(run["target"], report["latest"]))
            for document in report["checkpoints"]:
                path = _relative(run["target"], document["path"])
                facts = prints.get(path) or prints.get(document["path"])
                if path is None or facts is None or (only is not None and path != only):
                    continue
                row = rows.get(path) or _added(connection, run["id"], path, document, facts, now)
                kept += _keep_one(task, connection, run["id"], row, document, facts, now)
        assess(context, connection, run["id"])
    return kept


def _keep_one(
    task: Task, connection: Connection, run_id: int, row: Mapping[str, Any], document: Mapping[str, Any],
    facts: Mapping[str, Any], now: float,
) -> int:  # fmt: skip
    if facts["fingerprint"] != row["fingerprint"] or document["resume"] == Resume.WRITING:
        # It changed since it was listed: the watcher sees that too, and another look will follow.
        return 0
    record_verdict(connection, run_id, row["id"], document, facts["fingerprint"], now)
    digests.remember_files(connection, row["id"], facts["files"], now)
    if facts["tensors"]:
        digests.remember_tensors(connection, row["id"], facts["tensors"])
    if document["evidence"] >= Evidence.CONTENT:
        task.log(f"{document['path']}: {document['resume']} at {document['evidence']}")
    return 1


def _added(
    connection: Connection,
    run_id: int,
    path: str,
    document: Mapping[str, Any],
    facts: Mapping[str, Any],
    now: float,
) -> dict[str, Any]:
    """A lone file that only its content told to be a checkpoint."""
    checkpoints.put_checkpoint(
        connection,
        run_id,
        path,
        {
            "phase": str(Phase.COMPLETE),
            "phase_since": now,
            "first_seen": now,
            "changed_at": now,
            "completed_at": now,
            "fingerprint": facts["fingerprint"],
            "step": document["step"],
            "gone_at": None,
        },
    )
    return next(row for row in checkpoints.of_run(connection, run_id) if row["path"] == path)


def _relative(target: str, path: str | None) -> str | None:
    """A path of a document, relative to the run: how the catalog names checkpoints."""
    if path is None:
        return None
    base = target.rstrip("/")
    if path.rstrip("/") == base:
        return ""
    return path[len(base) + 1 :] if path.startswith(f"{base}/") else path

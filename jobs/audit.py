"""The job that proves checkpoints: each new one as soon as it is complete, all again from time to time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from ckptguard.catalog import checkpoints, digests, findings
from ckptguard.catalog.runs import get_run, set_run
from ckptguard.catalog.verdicts import record_verdict
from ckptguard.digest import blocks_digest
from ckptguard.errors import NothingRecognised
from ckptguard.jobs.assess import assess
from ckptguard.jobs.context import Context, run_settings
from ckptguard.jobs.ended import is_over, still
from ckptguard.jobs.lifecycle import Phase
from ckptguard.jobs.schedule import Candidate, by_need, due_again
from ckptguard.jobs.task import Task
from ckptguard.model import Evidence, Resume
from ckptguard.seals import SealedFile

AT_ONCE = 8
"""So many checkpoints are asked for in one request: a save that comes meanwhile waits for no more than these."""
TRIES = 3
UNREAD_PATIENCE = 30.0
"""So many seconds a complete save may be unreadable before that is a verdict: stores list before they read."""
OUTAGE_PATIENCE = 120.0
"""And so many after the whole store gave no answer: what comes back does so in parts."""
OURS = frozenset({"no-safe-checkpoint", "low-space", "missed-save", "stalled-save", "slow-save", "odd-size"})
"""What the service itself says of a run, knowing its history; a look that sees a part of it does not."""


def audit(task: Task) -> str:
    """Judge every complete checkpoint of a run that has no verdict on its present bytes; the newest first."""
    run = _run(task)
    failures: dict[int, int] = {}
    judged = 0
    while True:
        rows = _waiting(task, run["id"], failures)
        seen, early = _look(task, run, rows, done=judged)
        judged += seen
        if not rows:
            return f"{judged} checkpoints judged"
        for row in rows:
            # What is too young to be judged is not read three times in a row; the service comes back to it.
            failures[row["id"]] = TRIES if row["path"] in early else failures.get(row["id"], 0) + 1


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
    due = due_again(candidates, task.context.clock(), settings.again_every * 0.9)
    if task.row["origin"] == "person":
        due = by_need(candidates)
    bad = [c for c in by_need(candidates) if c.resume in (Resume.UNSAFE, Resume.UNKNOWN) and c not in due]
    chosen = [rows[c.id] for c in [*bad, *due]]
    judged = 0
    for start in range(0, len(chosen), AT_ONCE):
        judged += _look(task, run, chosen[start : start + AT_ONCE], done=start, of=len(chosen))[0]
    return f"{judged} of {len(candidates)} checkpoints read again"


def _run(task: Task) -> dict[str, Any]:
    assert task.run_id is not None
    with task.context.catalog.read() as connection:
        run = get_run(connection, task.run_id)
    assert run is not None
    return run


def _complete(connection: Connection, run_id: int) -> list[dict[str, Any]]:
    return [row for row in checkpoints.of_run(connection, run_id) if row["phase"] == Phase.COMPLETE]


def _waiting(task: Task, run_id: int, failures: Mapping[int, int]) -> list[dict[str, Any]]:
    """The newest checkpoints that are not judged as they are now, at the depth that the configuration wants."""
    depth, now = task.context.settings.audit.depth, task.context.clock()
    with task.context.catalog.read() as connection:
        rows = _complete(connection, run_id)
        unread = {row["id"] for row in checkpoints.unread(connection, run_id) if unread_due(row, now)}
    waiting = [
        row
        for row in rows
        if (
            row["judged_fingerprint"] != row["fingerprint"]
            or Evidence(row["evidence"]) < depth
            or row["id"] in unread
        )
        and failures.get(row["id"], 0) < TRIES
    ]
    waiting.sort(key=lambda r: (r["step"] if r["step"] is not None else -1, r["id"]), reverse=True)
    return waiting[:AT_ONCE]


def unread_due(row: Mapping[str, Any], now: float) -> bool:
    """Whether a checkpoint that could not be read is tried again: soon at first, then ever more seldom, each hour at last."""
    unread_for = row["judged_at"] - (row["changed_at"] or row["judged_at"])
    return bool(now - row["judged_at"] >= min(3600.0, max(60.0, unread_for)))


def _look(
    task: Task, run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *, done: int = 0, of: int = 0
) -> tuple[int, set[str]]:
    """One request to the reading process: these checkpoints deeply, and the run as a whole.

    Returns how many were judged, and the paths of those that it is too early to judge.
    """
    settings, watch = task.context.settings.audit, task.context.settings.watch
    depth = settings.depth if rows else Evidence.STRUCTURE
    now = task.context.clock()
    with task.context.catalog.read() as connection:
        current = get_run(connection, run["id"]) or run
        every = _complete(connection, run["id"])
        remembered = {row["path"]: digests.remembered_files(connection, row["id"]) for row in rows}
        known = {
            row["path"]: {
                "fingerprint": row["judged_fingerprint"],
                "resume": row["resume"],
                "evidence": row["evidence"],
            }
            for row in every
        }
    request = {
        "do": "audit",
        "target": run["target"],
        "depth": str(depth),
        # What is broken and did not change for so long is not being written any more,
        "grace": watch.stall_after,
        # nor are these; and those of the still ones that a pointer names.
        "over": [r["path"] for r in every if is_over(r, every, current, now, watch.stall_after)],
        "still": [r["path"] for r in every if still(r, now, watch.stall_after)],
        "max_rate": settings.max_rate,
        "deep": [row["path"] for row in rows],
        "known": known,
        "remembered": {path: _seal(path, held) for path, held in remembered.items() if held},
    }
    judged: list[str] = []
    early: set[str] = set()
    deep = set(request["deep"])

    def keep(part: dict[str, Any]) -> None:
        if part["document"]["resume"] == Resume.WRITING:
            early.add(part["path"])
        if _keep(task, run, part) and part["path"] in deep:
            judged.append(part["path"])

    def progress(name: str, count: int) -> None:
        task.say(f"reading {name}", min(1.0, (done + len(judged)) / of) if of else None)

    task.say("looking at the run")
    try:
        answer = task.child.ask(
            request, timeout=settings.timeout, progress=progress, cancelled=task.cancelled, part=keep
        )
    except NothingRecognised:
        answer = {"reports": []}
    _keep_run(task, run, answer)
    return len(judged), early


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


def _keep(task: Task, run: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Store one verdict with the digests that were read for it. Returns whether it was one on the present bytes."""
    context, document = task.context, part["document"]
    now = context.clock()
    with context.catalog.write() as connection:
        row = checkpoints.at_path(connection, run["id"], part["path"])
        if row is None:
            row = _added(connection, run["id"], part, now)
        if Phase(row["phase"]).open:
            # Being written, or stalled: the watcher speaks for it, and it is never called corrupt.
            return False
        if part["fingerprint"] != row["fingerprint"] or document["resume"] == Resume.WRITING:
            # It changed since it was listed: the watcher sees that too, and another look will follow.
            return False
        if _unread(document) and not _patient_enough(context, run, row, now):
            # A store that comes back lists before it reads: another look will follow.
            return False
        if (
            _unread(document)
            and row["judged_fingerprint"] == part["fingerprint"]
            and Resume(row["resume"]).safe
        ):
            # What was proven of these very bytes stays proven; that the store does not answer is said by the health.
            return False
        shallow = Evidence(document["evidence"]) < Evidence.CONTENT
        if shallow and row["judged_fingerprint"] == part["fingerprint"]:
            return False
        record_verdict(connection, run["id"], row["id"], document, part["fingerprint"], now)
        digests.remember_files(connection, row["id"], part["files"], now)
        if part["tensors"]:
            digests.remember_tensors(connection, row["id"], part["tensors"])
        assess(context, connection, run["id"])
    task.log(f"{document['path']}: {document['resume']} at {document['evidence']}")
    return True


def _patient_enough(context: Context, run: Mapping[str, Any], row: Mapping[str, Any], now: float) -> bool:
    """Whether that a checkpoint cannot be read may be said: it had the time, and its store did not fail as a whole of late."""
    settings = context.settings
    ailing = context.health.last_bad(f"run {run_settings(settings, run['target']).path}")
    if ailing is not None and now - ailing < OUTAGE_PATIENCE:
        return False
    return bool(now - (row["changed_at"] or 0.0) >= min(UNREAD_PATIENCE, settings.watch.stall_after))


def _unread(document: Mapping[str, Any]) -> bool:
    """Whether nothing but the store's failure to answer kept a look from a verdict."""
    blocking = {f["code"] for f in document["findings"] if f["effect"] in ("unknown", "unsafe")}
    return blocking == {"unreadable"}


def _added(connection: Connection, run_id: int, part: Mapping[str, Any], now: float) -> dict[str, Any]:
    """A lone file that only its content told to be a checkpoint."""
    checkpoints.put_checkpoint(
        connection,
        run_id,
        part["path"],
        {
            "phase": str(Phase.COMPLETE),
            "phase_since": now,
            "first_seen": now,
            "changed_at": now,
            "completed_at": now,
            "fingerprint": part["fingerprint"],
            "step": part["document"]["step"],
            "gone_at": None,
        },
    )
    row = checkpoints.at_path(connection, run_id, part["path"])
    assert row is not None
    return row


def _keep_run(task: Task, run: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Store what can only be said of the run as a whole: pointers, left-overs, duplicates."""
    context = task.context
    seen = [f for report in answer["reports"] for f in report["findings"] if f["code"] not in OURS]
    latest = next((r["latest"] for r in reversed(answer["reports"]) if r["latest"] is not None), None)
    with context.catalog.write() as connection:
        findings.sync_findings(connection, run["id"], None, "audit", seen, context.clock())
        set_run(connection, run["id"], latest=latest)
        assess(context, connection, run["id"])

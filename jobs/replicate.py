"""The job that copies each new safe checkpoint to where the configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ckptguard.catalog import checkpoints, findings
from ckptguard.catalog.restores import put_upload, uploads_of_run
from ckptguard.catalog.runs import get_run
from ckptguard.codes import finding
from ckptguard.errors import CkptguardError
from ckptguard.jobs.assess import assess
from ckptguard.jobs.children import Cancelled
from ckptguard.jobs.command import ckptguard
from ckptguard.jobs.context import Context, run_settings
from ckptguard.jobs.lifecycle import Phase
from ckptguard.jobs.task import Task
from ckptguard.model import Finding, Resume
from ckptguard.units import duration


def replicate(task: Task) -> str:
    """Copy what is safe and not there yet, newest first. A copy that failed is tried again the next time."""
    context = task.context
    assert task.run_id is not None
    with context.catalog.read() as connection:
        run = get_run(connection, task.run_id)
        assert run is not None
        rows = [r for r in checkpoints.of_run(connection, run["id"]) if r["phase"] == Phase.COMPLETE]
        copies = {u["checkpoint_id"]: u for u in uploads_of_run(connection, run["id"])}
    destination = run_settings(context.settings, run["target"]).replicate_to
    if destination is None:
        return "this run is not copied anywhere"
    waiting = [
        r for r in rows if Resume(r["resume"]).safe and not (copies.get(r["id"]) or {}).get("verified")
    ]
    done = 0
    for row in sorted(waiting, key=lambda r: -(r["step"] or 0)):
        done += _copy(task, run, row, destination)
    with context.catalog.write() as connection:
        late = [
            asdict(f) for f in late_copies(context, rows, uploads_of_run(connection, run["id"]), destination)
        ]
        findings.sync_findings(connection, run["id"], None, "replicate", late, context.clock())
        assess(context, connection, run["id"])
    return f"{done} of {len(waiting)} checkpoints copied to {destination}"


def _copy(task: Task, run: Mapping[str, Any], row: Mapping[str, Any], destination: str) -> bool:
    context = task.context
    settings = context.settings.replicate
    source = f"{run['target'].rstrip('/')}/{row['path']}" if row["path"] else run["target"]
    task.say(f"copying {source}")
    started = context.clock()
    values: dict[str, Any] = {"started": started, "bytes": row["bytes"], "error": None, "verified": False}
    with context.catalog.write() as connection:
        put_upload(connection, row["id"], destination, values)
        checkpoints.add_event(connection, run["id"], row["id"], started, "uploading", destination)
    words = ["replicate", source, destination]
    if settings.max_rate is not None:
        words += ["--max-rate", str(settings.max_rate)]
    try:
        answer = ckptguard(task, words, settings.timeout)
        error = None if answer.status == 0 else f"replicate ended with status {answer.status}"
    except Cancelled:
        raise
    except CkptguardError as failure:
        error = failure.message
    now = context.clock()
    with context.catalog.write() as connection:
        if error is None:
            lag = now - (row["completed_at"] or started)
            values |= {"completed": now, "lag": lag, "verified": True}
            checkpoints.add_event(connection, run["id"], row["id"], now, "uploaded", destination)
        else:
            values["error"] = error
            task.log(f"{source}: {error}")
        put_upload(connection, row["id"], destination, values)
    return error is None


def late_copies(
    context: Context, rows: list[dict[str, Any]], copies: list[dict[str, Any]], destination: str
) -> list[Finding]:
    """A safe checkpoint whose copy is not there though it should be."""
    there = {u["checkpoint_id"] for u in copies if u["verified"] and u["destination"] == destination}
    now, limit = context.clock(), context.settings.replicate.late_after
    late = [
        r
        for r in rows
        if Resume(r["resume"]).safe and r["id"] not in there and now - (r["completed_at"] or now) > limit
    ]
    if not late:
        return []
    newest = max(late, key=lambda r: r["completed_at"] or 0.0)
    age = duration(now - newest["completed_at"])
    message = f"complete for {age} and not copied to {destination}"
    if len(late) > 1:
        message += f"; {len(late)} copies are late"
    return [finding("upload-lag", newest["path"], message)]

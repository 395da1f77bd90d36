"""The job that restores a checkpoint into real objects on a schedule and keeps the proof."""

from __future__ import annotations

from typing import Any

from ckptguard.catalog import checkpoints
from ckptguard.catalog.restores import record_restore
from ckptguard.catalog.runs import get_run
from ckptguard.errors import CkptguardError
from ckptguard.jobs.assess import assess
from ckptguard.jobs.command import ckptguard
from ckptguard.jobs.context import run_settings
from ckptguard.jobs.lifecycle import Phase
from ckptguard.jobs.schedule import Candidate, pick_for_restore
from ckptguard.jobs.task import Task
from ckptguard.model import Resume
from ckptguard.settings import RestoreSettings, RunSettings


def restore(task: Task) -> str:
    """Restore the checkpoint whose turn it is, by the configured recipe or command of its run."""
    context = task.context
    settings = context.settings.restore
    assert task.run_id is not None
    with context.catalog.read() as connection:
        run = get_run(connection, task.run_id)
        assert run is not None
        rows = {r["id"]: r for r in checkpoints.of_run(connection, run["id"]) if r["phase"] == Phase.COMPLETE}
    known = run_settings(context.settings, run["target"])
    if known.recipe is None and known.command is None:
        return "this run has no recipe and no command"
    candidates = [
        Candidate(r["id"], r["step"], r["completed_at"] or 0.0, Resume(r["resume"]), r["restored_at"])
        for r in rows.values()
    ]
    chosen = pick_for_restore(
        candidates, settings.pick, now=context.clock(), window=settings.window, nth=settings.nth
    )
    if chosen is None:
        return "no checkpoint fits the rule"
    row = rows[chosen.id]
    target = f"{run['target'].rstrip('/')}/{row['path']}" if row["path"] else run["target"]
    task.say(f"restoring {target}")
    began = context.monotonic()
    answer = ckptguard(task, arguments(target, known, settings), 6 * settings.timeout + 60.0)
    if not isinstance(answer.document, dict) or "result" not in answer.document:
        raise CkptguardError(f"restore ended with status {answer.status} and no document")
    took = context.monotonic() - began
    with context.catalog.write() as connection:
        record_restore(connection, run["id"], row["id"], answer.document, now=context.clock(), took=took)
        assess(context, connection, run["id"])
    return f"{target}: {answer.document['result']}"


def arguments(target: str, run: RunSettings, settings: RestoreSettings) -> list[str]:
    """The command line of `ckptguard restore`. Recipe and command come from the configuration, never from a request."""
    words: list[Any] = ["restore", target, "--steps", settings.steps, "--timeout", f"{settings.timeout:.0f}s"]
    if run.recipe is not None:
        words += ["--recipe", run.recipe]
    elif run.command is not None:
        words += ["--command", run.command]
        if run.metrics is not None:
            words += ["--metrics", run.metrics]
    if settings.max_memory is not None:
        words += ["--max-memory", settings.max_memory]
    if settings.device != "auto":
        words += ["--device", settings.device]
    return [str(word) for word in words]

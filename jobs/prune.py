"""The job that rotates checkpoints by `ckptguard prune`: a plan in its log, unless the configuration says apply."""

from __future__ import annotations

from ckptguard.catalog.runs import get_run
from ckptguard.jobs.command import ckptguard
from ckptguard.jobs.task import Task


def prune(task: Task) -> str:
    """Plan, or apply, the rotation of one run by the options of the configuration."""
    settings = task.context.settings.prune
    assert task.run_id is not None
    if settings is None:
        return "switched off"
    with task.context.catalog.read() as connection:
        run = get_run(connection, task.run_id)
    assert run is not None
    words = ["prune", run["target"], *(word for option in settings.options for word in option.split())]
    if settings.apply:
        words.append("--apply")
    answer = ckptguard(task, words, settings.timeout)
    task.log(str(answer.document))
    if answer.status != 0:
        return f"something was refused (status {answer.status}); the log says what"
    return "applied" if settings.apply else "planned; nothing was deleted"

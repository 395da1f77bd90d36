"""The job that forgets old history."""

from __future__ import annotations

from ckptguard.catalog import retention
from ckptguard.jobs.task import Task


def housekeeping(task: Task) -> str:
    """Delete what is older than the retention of the configuration."""
    context = task.context
    with context.catalog.write() as connection:
        gone = retention.forget(connection, context.clock() - context.settings.retention)
    counts = ", ".join(f"{count} {table}" for table, count in gone.items() if count)
    return f"forgot {counts}" if counts else "nothing was old enough"

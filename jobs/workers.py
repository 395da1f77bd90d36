"""The threads that take jobs from the queue, one at a time each, and record how every run of one ended."""

from __future__ import annotations

import threading
import traceback
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from ckptguard.catalog import jobs
from ckptguard.catalog.runs import get_run
from ckptguard.errors import CkptguardError
from ckptguard.jobs.children import Cancelled, Children
from ckptguard.jobs.context import Context
from ckptguard.jobs.kinds import KINDS
from ckptguard.jobs.task import Task

IDLE = 2.0
"""Seconds between two looks at an empty queue, should a wake-up get lost."""
PATIENCE = 60.0


class Workers:
    """Started and stopped by the service."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._children = Children()
        self._threads: list[threading.Thread] = []
        self._restores = threading.Semaphore(context.settings.restore.at_once)
        # Jobs whose end the catalog could not keep: queued again as soon as it answers.
        self._orphans: list[dict[str, Any]] = []

    def start(self) -> None:
        for number in range(self.context.settings.at_once):
            thread = threading.Thread(target=self._loop, name=f"ckptguard-job-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, timeout: float) -> None:
        """Wait for the jobs, which see that the service stops; then end what they read with."""
        self.context.wake.set()
        for thread in self._threads:
            thread.join(timeout)
        self._children.end()

    def _loop(self) -> None:
        context = self.context
        name = threading.current_thread().name
        while not context.stopping.is_set():
            context.health.beat(name, context.monotonic(), float("inf"))
            try:
                worked = self._work()
                context.health.good(name)
            except SQLAlchemyError as error:
                context.health.bad(name, f"the catalog does not answer: {type(error).__name__}", vital=True)
                worked = False
            if not worked and not context.stopping.is_set():
                context.wake.wait(IDLE)
                context.wake.clear()

    def _work(self) -> bool:
        """Take one job and do it. Returns whether there was one. Raises SQLAlchemyError."""
        may_restore = self._restores.acquire(blocking=False)
        try:
            with self.context.catalog.write() as connection:
                for orphan in list(self._orphans):
                    jobs.give_back(connection, orphan, self.context.clock())
                    self._orphans.remove(orphan)
                row = jobs.claim(
                    connection, self.context.clock(), without=() if may_restore else ("restore",)
                )
            if row is None:
                return False
            if row["name"] != "restore" and may_restore:
                self._restores.release()
                may_restore = False
            self._do(row)
            return True
        finally:
            if may_restore:
                self._restores.release()

    def _do(self, row: dict[str, Any]) -> None:
        task = Task(self.context, row, self._children.mine())
        try:
            state, result = _outcome(task)
            if state == "cancelled" and self.context.stopping.is_set():
                return  # it did not end: the next start finds it and queues it again
            with self.context.catalog.write() as connection:
                jobs.finish(connection, row["id"], state, result, task.log_text, self.context.clock())
                run = get_run(connection, row["run_id"]) if row["run_id"] is not None else None
            part = f"job {row['name']}" + (f" {run['target']}" if run is not None else "")
            if state == "failed":
                self.context.health.bad(part, result)
            elif state == "done":
                self.context.health.good(part)
        except SQLAlchemyError:
            self._orphans.append(row)
            raise


def _outcome(task: Task) -> tuple[str, str]:
    """Do the job; its state and its result in words."""
    kind = KINDS.get(task.row["name"])
    if kind is None:
        return "failed", f"this version knows no job {task.row['name']!r}"
    try:
        return "done", kind.work(task)
    except Cancelled:
        return "cancelled", "cancelled"
    except SQLAlchemyError:
        raise
    except CkptguardError as error:
        return "failed", f"{error.message} {error.hint}".strip()
    except Exception as error:  # noqa: BLE001 - a fault of ours ends this job, not the service
        task.log(traceback.format_exc())
        return "failed", f"{type(error).__name__}: {error}"

"""When periodic jobs are queued: built from the configuration at each start. The only importer of apscheduler."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger


class Schedule:
    """Calls functions at their periods in a thread of its own. Nothing of it is kept: the catalog knows what was missed."""

    def __init__(self) -> None:
        self._scheduler = BackgroundScheduler(
            timezone=UTC,
            executors={"default": ThreadPoolExecutor(2)},
            # A machine that slept runs each missed job once.
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )

    def every(self, name: str, seconds: float, first_in: float, call: Callable[[], None]) -> None:
        """Call in `first_in` seconds, then every `seconds`. A name that is there already is replaced."""
        self._scheduler.add_job(
            call,
            IntervalTrigger(seconds=max(1, round(seconds)), timezone=UTC),
            id=name,
            replace_existing=True,
            next_run_time=datetime.now(UTC) + timedelta(seconds=first_in),
        )

    def drop(self, keep: Callable[[str], bool]) -> None:
        """Forget what is not wanted any more."""
        for job in self._scheduler.get_jobs():
            if not keep(job.id):
                job.remove()

    def names(self) -> set[str]:
        return {job.id for job in self._scheduler.get_jobs()}

    def next_times(self) -> dict[str, float]:
        """When each is due, in epoch seconds."""
        return {
            job.id: job.next_run_time.timestamp() for job in self._scheduler.get_jobs() if job.next_run_time
        }

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

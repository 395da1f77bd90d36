"""Puts the parts together: one process that watches, works, alerts, and goes on where it was after any end."""

from __future__ import annotations

import glob
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from ckptguard.catalog import Catalog, checkpoints, jobs, outbox
from ckptguard.catalog.lead import Lead
from ckptguard.catalog.runs import get_run, watch_only
from ckptguard.errors import UsageError
from ckptguard.jobs.assess import assess_all
from ckptguard.jobs.audit import unread_due
from ckptguard.jobs.context import Context, open_routes, run_settings
from ckptguard.jobs.deliver import deliver
from ckptguard.jobs.ended import LEAST, is_over
from ckptguard.jobs.events import Events
from ckptguard.jobs.follow import follow
from ckptguard.jobs.health import Health
from ckptguard.jobs.kinds import Kind, configured
from ckptguard.jobs.schedule import first_delay
from ckptguard.jobs.scheduler import Schedule
from ckptguard.jobs.watch import URGENT, Target, Watched, look
from ckptguard.jobs.workers import Workers
from ckptguard.settings import RunSettings, Settings

TICK = 0.25
DELIVER_EVERY = 1.0
ASSESS_EVERY = 30.0
DISCOVER_EVERY = 60.0
LEAD_EVERY = 5.0
JUMP = 30.0
"""A wall clock that moved by so much more or less than time did has jumped."""
WATCH_THREADS = 4
PLAN_EVERY = 1.0
DEBOUNCE = 0.5
RETRY = 20.0
"""Seconds until a look that failed is tried again."""
RECHECK_EVERY = 5.0
LOOK_OFTEN = 300.0
"""What could not be judged for so long is not looked at so often any more."""
STOP_SECONDS = 10.0


class Service:
    """`start`, then `stop`. Everything that it needs of the outside is in its context."""

    def __init__(
        self, settings: Settings, catalog: Catalog, url: str | None, clock: Callable[[], float] = time.time
    ) -> None:
        self.settings = settings
        self.context = Context(settings, catalog, open_routes(settings), url, clock, health=Health(clock))
        self.targets: dict[str, Target] = {}
        self._lead = Lead(catalog)
        self._leading = False
        self._events = Events()
        self._schedule = Schedule()
        self._workers = Workers(self.context)
        self._looks = ThreadPoolExecutor(WATCH_THREADS, thread_name_prefix="ckptguard-watch")
        self._threads: list[threading.Thread] = []
        self._clocks = (0.0, 0.0)
        self._checked = 0.0
        self._unplanned = threading.Event()

    # --- life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises UsageError when another service leads on this catalog; SQLAlchemyError when the catalog fails."""
        context = self.context
        if not self._lead.hold():
            raise UsageError(
                "another ckptguard serve works with this catalog",
                "stop it, or name another catalog with --db",
            )
        self._leading = True
        with context.catalog.write() as connection:
            jobs.recover(connection, context.clock())
            outbox.drop_unknown(connection, [route.name for route in context.routes], context.clock())
        self._discover()
        self._clocks = (context.clock(), context.monotonic())
        self._plan()
        self._schedule.start()
        self._workers.start()
        self._thread("watch", TICK, self._watch)
        self._thread("follow", self.settings.follow_every, self._follow)
        self._thread("assess", min(ASSESS_EVERY, self.settings.watch.stall_after), self._assess)
        self._thread("recheck", min(RECHECK_EVERY, self.settings.watch.stall_after), self._recheck)
        self._thread("discover", DISCOVER_EVERY, self._discover)
        self._thread("plan", PLAN_EVERY, self._entered)
        self._thread("lead", LEAD_EVERY, self._keep_leading)
        for route in context.routes:
            self._thread(f"deliver {route.name}", DELIVER_EVERY, partial(deliver, context, route))

    def stop(self) -> None:
        """End everything; jobs that were at work are queued again by the next start."""
        self.context.stopping.set()
        self._events.stop()
        self._schedule.stop()
        self._workers.stop(STOP_SECONDS)
        for thread in self._threads:
            thread.join(STOP_SECONDS)
        self._looks.shutdown(wait=True, cancel_futures=True)
        self._lead.release()

    def _thread(self, name: str, every: float, call: Callable[[], Any]) -> None:
        thread = threading.Thread(
            target=self._repeat, args=(name, every, call), name=f"ckptguard-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _repeat(self, name: str, every: float, call: Callable[[], Any]) -> None:
        """Call again and again by the monotonic clock; whatever it raises is shown by the health and tried again."""
        context = self.context
        while not context.stopping.is_set():
            began = context.monotonic()
            try:
                if self._leading or name == "lead":
                    call()
                    context.health.good(name)
            except SQLAlchemyError as error:
                context.health.bad(name, f"the catalog does not answer: {type(error).__name__}", vital=True)
            except Exception as error:  # noqa: BLE001 - one part that fails must not end the others, nor itself
                context.health.bad(name, f"{type(error).__name__}: {error}")
                print(f"ckptguard: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            context.health.beat(name, context.monotonic(), max(60.0, 10 * every))
            context.stopping.wait(max(0.05, every - (context.monotonic() - began)))

    def _keep_leading(self) -> None:
        self._leading = self._lead.hold()
        if not self._leading:
            raise RuntimeError("the lock of the catalog was lost; another service may have it")
        self._mind_the_clock()

    def _mind_the_clock(self) -> None:
        """A wall clock that jumped would let the schedule wait for hours, or hurry."""
        wall, steady = self.context.clock(), self.context.monotonic()
        drift = (wall - self._clocks[0]) - (steady - self._clocks[1])
        self._clocks = (wall, steady)
        if abs(drift) > JUMP:
            print(f"ckptguard: the clock jumped by {drift:.0f} s; the schedule is made anew", file=sys.stderr)
            self._plan()

    # --- what is watched ----------------------------------------------------------------------------

    def _discover(self) -> None:
        """The targets of the configuration, with those that its patterns find now."""
        wanted: dict[str, RunSettings] = {run.path: run for run in self.settings.runs}
        for pattern in self.settings.discover:
            for path in sorted(glob.glob(pattern)):  # noqa: PTH207 - the pattern may be absolute
                if Path(path).is_dir():
                    wanted.setdefault(path, RunSettings(path=path))
        for path, run in wanted.items():
            if path not in self.targets:
                self.targets[path] = Target(run)

    def _watch(self) -> None:
        """Start the looks that are due, each in a thread: a mount that hangs holds up only itself."""
        now = self.context.monotonic()
        if now >= self._checked + self.settings.watch.every:
            self._checked = now
            for path in self._events.stale():
                self._soon(self.targets[path])
        for target in list(self.targets.values()):
            if target.busy:
                if now - target.started > 120.0:
                    self.context.health.bad(
                        f"run {target.path}", f"a look takes {now - target.started:.0f} s so far"
                    )
                continue
            if now >= target.due:
                target.busy, target.started = True, now
                self._looks.submit(self._look, target)

    def _look(self, target: Target) -> None:
        context, watch = self.context, self.settings.watch
        new = not target.runs
        try:
            heard = watch.events and self._events.keep(target.path, lambda: self._soon(target))
            target.due = float("inf")
            saving = look(context, target)
            wait = min(watch.every, watch.settle) if saving else watch.quiet_every if heard else watch.every
            context.health.good(f"look {target.path}")
        except SQLAlchemyError as error:
            context.health.bad(
                f"look {target.path}", f"the catalog does not answer: {type(error).__name__}", vital=True
            )
            # What the catalog did not keep must not be remembered either.
            target.runs.clear()
            wait = watch.every
        except Exception as error:  # noqa: BLE001 - one odd run must not end the watch of the others
            context.health.bad(f"look {target.path}", f"{type(error).__name__}: {error}")
            wait = watch.every
        finally:
            target.busy = False
        target.due = min(target.due, context.monotonic() + wait)
        if new and target.runs:
            self._unplanned.set()
            for watched in list(target.runs.values()):
                follow(context, watched)

    def _soon(self, target: Target) -> None:
        """Something changed: look soon, and not for every single write."""
        target.due = min(target.due, max(self.context.monotonic(), target.started + DEBOUNCE))

    def _entered(self) -> None:
        """New runs were seen: plan for them. Many that appear at once are planned for together."""
        if not self._unplanned.is_set():
            return
        self._unplanned.clear()
        with self.context.catalog.write() as connection:
            watch_only(connection, [watched.run_id for watched in self.watched()])
        self._plan()

    def watched(self) -> list[Watched]:
        """Every run that was seen."""
        return [watched for target in list(self.targets.values()) for watched in list(target.runs.values())]

    def _follow(self) -> None:
        for watched in self.watched():
            if self.context.stopping.is_set():
                return
            follow(self.context, watched)

    def _assess(self) -> None:
        """What time alone changes: late saves and reminders."""
        assess_all(self.context, [watched.run_id for watched in self.watched()])

    def _recheck(self) -> None:
        """Have those looked at again whose verdict had to wait: their save may be over now, or their store well again."""
        now, patience = self.context.clock(), self.settings.watch.stall_after
        mine = {watched.run_id for watched in self.watched()}
        with self.context.catalog.read() as connection:
            waiting = checkpoints.unjudged(connection, now - min(LEAST, patience))
            again = {row["run_id"] for row in checkpoints.unread(connection) if unread_due(row, now)}
            every: dict[int, list[dict[str, Any]]] = {}
            for row in waiting:
                every.setdefault(row["run_id"], []).append(row)
            due = [
                run_id
                for run_id in sorted((again | every.keys()) & mine)
                if self._due(connection, run_id, every.get(run_id, []), now, tried=run_id in again)
            ]
        for run_id in due:
            self.queue("audit", run_id, "watch")

    def _due(
        self, connection: Connection, run_id: int, waiting: list[dict[str, Any]], now: float, *, tried: bool
    ) -> bool:
        """Whether another look at a run may tell more than its last one did; `tried`: it is time to try again to read."""
        patience = self.settings.watch.stall_after
        retry = min(RETRY, patience)
        job = jobs.newest(connection, "audit", run_id)
        if job is None:
            return True
        if job["ended_at"] is None:
            return False
        since = now - job["ended_at"]
        # A last look in the future was made before the clock was set back.
        if since < 0 or since >= patience or (since >= retry and (tried or job["state"] == "failed")):
            return True
        run = get_run(connection, run_id)
        if run is None:
            return False
        rows = checkpoints.of_run(connection, run_id)
        for row in waiting:
            idle = now - row["changed_at"]
            # Once when it has lain still; and soon after something tells that its save is over.
            first = job["started_at"] is not None and job["started_at"] < row["changed_at"] + LEAST <= now
            if first or (since >= retry and idle < LOOK_OFTEN and is_over(row, rows, run, now, patience)):
                return True
        return False

    # --- what is planned ----------------------------------------------------------------------------

    def _plan(self) -> None:
        """Build the schedule from the configuration and from when each job ran last."""
        with self.context.catalog.read() as connection:
            last = jobs.last_started(connection)
        wanted: set[str] = set()
        for kind in configured(self.settings).values():
            runs: list[int | None] = [None]
            if kind.for_run:
                runs = [w.run_id for w in self.watched() if kind.wants(run_settings(self.settings, w.target))]
            for run_id in runs:
                wanted.add(self._plan_one(kind, run_id, last.get((kind.name, run_id))))
        self._schedule.drop(lambda name: name in wanted)

    def _plan_one(self, kind: Kind, run_id: int | None, last: float | None) -> str:
        name = kind.name if run_id is None else f"{kind.name}:{run_id}"
        every = kind.every(self.settings)
        assert every is not None
        delay = first_delay(last, every, self.context.clock())
        if last is None and kind.name != "audit":
            # Nothing was missed yet: a first look at everything is what `audit` does.
            delay = min(every, 60.0)
        self._schedule.every(name, every, delay, partial(self._queue, kind.name, run_id))
        return name

    def _queue(self, name: str, run_id: int | None) -> None:
        """Queue a periodic job. A catalog that is gone loses nothing: the next period queues it."""
        try:
            self.queue(name, run_id, "schedule")
        except SQLAlchemyError as error:
            self.context.health.bad(
                "schedule", f"the catalog does not answer: {type(error).__name__}", vital=True
            )
            return
        self.context.health.good("schedule")

    def queue(self, name: str, run_id: int | None, origin: str = "person") -> int:
        """Queue a job, and wake a worker; returns its number. Raises SQLAlchemyError."""
        kind = configured(self.settings)[name]
        with self.context.catalog.write() as connection:
            number = jobs.enqueue(
                connection,
                name,
                now=self.context.clock(),
                run_id=run_id,
                origin=origin,
                priority=kind.priority + (URGENT if origin == "person" else 0),
            )
        self.context.wake.set()
        return number

    def next_times(self) -> Mapping[str, float]:
        return self._schedule.next_times()

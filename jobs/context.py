"""What every job is given: settings, catalog, clock, sinks, health. Nothing else is global."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckptguard.alerts import open_sink
from ckptguard.catalog import Catalog
from ckptguard.catalog.troubles import routed
from ckptguard.errors import UsageError
from ckptguard.jobs.health import Health
from ckptguard.model import Severity
from ckptguard.ports import AlertSink
from ckptguard.settings import AlertSettings, RunSettings, Settings


@dataclass(frozen=True, slots=True)
class Route:
    """A sink, its name, and what goes to it."""

    name: str
    sink: AlertSink
    settings: AlertSettings


@dataclass(frozen=True)
class Context:
    """Shared by all jobs. `wake` is set when the queue got something; `stopping` when everything must end."""

    settings: Settings
    catalog: Catalog
    routes: tuple[Route, ...]
    url: str | None
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    wake: threading.Event = field(default_factory=threading.Event)
    stopping: threading.Event = field(default_factory=threading.Event)
    health: Health = field(default_factory=lambda: Health(time.time))

    def sinks(self, names: tuple[str, ...]) -> Callable[[Severity, str], list[str]]:
        """Which sinks an alert of a run goes to, by its severity and code."""

        def choose(severity: Severity, code: str) -> list[str]:
            return [
                route.name
                for route in self.routes
                if routed(
                    severity,
                    code,
                    names,
                    least=route.settings.severity,
                    runs=route.settings.runs,
                    codes=route.settings.codes,
                )
            ]

        return choose

    def page(self, run_id: int | None, checkpoint_id: int | None) -> str | None:
        """The address of the page about something, when pages are served."""
        if self.url is None:
            return None
        if checkpoint_id is not None:
            return f"{self.url}/checkpoints/{checkpoint_id}"
        return f"{self.url}/runs/{run_id}" if run_id is not None else self.url


def open_routes(settings: Settings) -> tuple[Route, ...]:
    """Every sink of the configuration, opened. Raises UsageError, MissingExtra.

    A sink without a name is called by its place and kind: its URL may be a secret, and the outbox remembers the name.
    """
    routes: list[Route] = []
    taken: Mapping[str, int] = {}
    for place, one in enumerate(settings.alerts, start=1):
        spec = one.sink.get_secret_value()
        name = one.name or f"{place}-{spec.partition(':')[0]}"
        if name in taken:
            name = f"{name}-{place}"
        taken = {**taken, name: place}
        try:
            sink = open_sink(spec)
        except UsageError as error:
            raise UsageError(f"sink {name}: {error.message}", error.hint) from error
        routes.append(Route(name, sink, one))
    return tuple(routes)


def run_settings(settings: Settings, target: str) -> RunSettings:
    """What the configuration says of a run: its own entry, or that of the folder it was found in."""
    for run in settings.runs:
        if target == run.path or target.startswith(run.path.rstrip("/") + "/"):
            return run
    return RunSettings(path=target)

"""What the web is given: the catalog to read, and the few things of the service that it may show or ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptguard.catalog import Catalog
from ckptguard.jobs.health import Health
from ckptguard.jobs.kinds import Kind
from ckptguard.settings import Settings


@dataclass(frozen=True)
class State:
    """`queue(name, run id)` asks for a configured job; `next_times` says when periodic ones are due."""

    catalog: Catalog
    settings: Settings
    health: Health
    kinds: Mapping[str, Kind]
    queue: Callable[[str, int | None], int]
    next_times: Callable[[], Mapping[str, float]]
    token: str
    url: str | None
    clock: Callable[[], float]
    monotonic: Callable[[], float]

    def health_document(self) -> dict[str, Any]:
        """`/healthz`: what works and what does not. Paths are named, secrets never."""
        from ckptguard.units import timestamp

        now = self.monotonic()
        return {
            "status": self.health.status(now),
            "problems": [
                {"part": a.part, "message": a.message, "since": timestamp(a.since), "vital": a.vital}
                for a in self.health.ailments(now)
            ],
        }

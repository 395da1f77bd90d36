"""What the service knows of its own well-being: shown at /healthz, never hidden."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ailment:
    """One part that does not work: since when, and what was last seen. `vital`: nothing works without it."""

    part: str
    message: str
    since: float
    vital: bool = False


class Health:
    """A board that every part writes to. Safe from several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ailments: dict[str, Ailment] = {}
        self._beats: dict[str, tuple[float, float]] = {}
        self._last_bad: dict[str, float] = {}

    def bad(self, part: str, message: str, *, vital: bool = False) -> None:
        with self._lock:
            self._last_bad[part] = self._clock()
            before = self._ailments.get(part)
            since = before.since if before is not None else self._clock()
            self._ailments[part] = Ailment(part, message, since, vital)

    def good(self, part: str) -> None:
        with self._lock:
            self._ailments.pop(part, None)

    def last_bad(self, part: str) -> float | None:
        """When a part failed last, though it may work again; None where it never did."""
        with self._lock:
            return self._last_bad.get(part)

    def beat(self, part: str, at: float, patience: float) -> None:
        """A part that works again and again did so at a monotonic time; silence for longer than `patience` is an ailment."""
        with self._lock:
            self._beats[part] = (at, patience)

    def ailments(self, monotonic: float) -> list[Ailment]:
        """Everything that is wrong, vital things first."""
        with self._lock:
            found = list(self._ailments.values())
            silent = [
                Ailment(
                    part, f"has not worked for {monotonic - at:.0f} s", self._clock() - (monotonic - at), True
                )
                for part, (at, patience) in self._beats.items()
                if monotonic - at > patience
            ]
        return sorted([*found, *silent], key=lambda a: (not a.vital, a.part))

    def status(self, monotonic: float) -> str:
        """`ok`, `degraded` (something does not work), `failing` (nothing does)."""
        found = self.ailments(monotonic)
        if any(a.vital for a in found):
            return "failing"
        return "degraded" if found else "ok"

"""A store that reads nothing more once the time is up, so that a look with a time limit ends and says what it missed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptguard.errors import StoreError
from ckptguard.model import Entry
from ckptguard.ports import Fill, Store
from ckptguard.storage._wrapper import Wrapper


class TimeIsUp(StoreError):
    """Not read, because the time limit was reached: nothing is known of these bytes."""

    error_code = "timeout"


class Timed(Wrapper):
    """`inner` until `deadline`, in epoch seconds; after that every read and listing raises TimeIsUp."""

    def __init__(self, inner: Store, deadline: float, now: Callable[[], float] = time.time) -> None:
        super().__init__(inner)
        self.deadline, self._now = deadline, now

    def _check(self, what: str) -> None:
        if self._now() > self.deadline:
            raise TimeIsUp(
                f"{what}: not read, the time limit was reached", "give it more time: --timeout DURATION"
            )

    def list(self, prefix: str = "") -> Iterator[Entry]:
        for entry in self.inner.list(prefix):
            self._check(entry.key)
            yield entry

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        self._check(key)
        self.inner.readinto(key, start, buffer)

    @contextmanager
    def stream(self, key: str, start: int, end: int) -> Iterator[Fill]:
        with self.inner.stream(key, start, end) as fill:

            def in_time(buffer: memoryview) -> None:
                self._check(key)
                fill(buffer)

            yield in_time

    def fresh(self, key: str) -> Store | None:
        inner = self.inner.fresh(key)
        return None if inner is None else Timed(inner, self.deadline, self._now)

"""A store that reads no faster than it is told to, so that an audit does not slow the training's own saves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ckptguard.errors import UsageError
from ckptguard.ports import Store
from ckptguard.storage._wrapper import Wrapper

PIECE = 1 << 20


class Limited(Wrapper):
    """`inner`, read at `bytes_per_second` at most, all threads together."""

    def __init__(
        self,
        inner: Store,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        if bytes_per_second <= 0:
            raise UsageError(f"the rate must be positive, got {bytes_per_second:g} bytes per second")
        self.rate = bytes_per_second
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        # In pieces, so that a big buffer neither bursts nor sleeps for minutes at a time. A request over the network
        # is not cut: there each piece would cost a round trip.
        step = max(PIECE, self.traits.request_bytes * 128)
        for at in range(0, len(buffer), step):
            piece = buffer[at : at + step]
            self._wait(len(piece))
            self.inner.readinto(key, start + at, piece)

    def _wait(self, size: int) -> None:
        """Book time for `size` bytes after what others have booked, and sleep until it comes."""
        with self._lock:
            begin = max(self._clock(), self._free_at)
            self._free_at = begin + size / self.rate
        delay = begin - self._clock()
        if delay > 0:
            self._sleep(delay)

    def fresh(self, key: str) -> Store | None:
        inner = self.inner.fresh(key)
        return None if inner is None else Limited(inner, self.rate, clock=self._clock, sleep=self._sleep)

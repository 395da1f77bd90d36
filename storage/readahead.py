"""Makes a sequential reader of a distant store fast: what it will ask for next is on its way already."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from ckptguard.errors import StoreError
from ckptguard.model import Entry
from ckptguard.ports import Fill, Store
from ckptguard.storage._wrapper import Wrapper

CHUNK = 8 << 20
AHEAD = 4
BUFFERS = 12
# Two headers in a row are no sequential read; some megabytes are.
RUN = 2 << 20
# Containers pad their records: a reader that skips the padding is sequential all the same.
GAP = 64 << 10
# A small read brings this much, and the next small reads near it cost no request.
WINDOW = 32 << 10
WINDOWS = 64
# A chunk that so many later reads did not touch was fetched for nothing.
STALE = 64


@dataclass(slots=True, eq=False)
class _Chunk:
    start: int
    end: int
    data: Future[bytearray]
    born: int
    left: int


@dataclass(slots=True)
class _Progress:
    """What has been read of one key: how much, where the last reads ended, which chunks were fetched already."""

    size: int | None = None
    etag: str | None = None
    total: int = 0
    ends: deque[int] = field(default_factory=lambda: deque(maxlen=16))
    fetched: set[int] = field(default_factory=set)


class ReadAhead(Wrapper):
    """`inner`, with ranges fetched in parallel ahead of its readers; several may share a file. Memory: BUFFERS chunks.

    Small reads, as of headers, bring their neighbourhood along. Both is forgotten when an object is seen to be replaced.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[str, int], _Chunk] = OrderedDict()
        self._progress: dict[str, _Progress] = {}
        self._windows: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._reads = 0
        self._pool: ThreadPoolExecutor | None = None

    def list(self, prefix: str = "") -> Iterator[Entry]:
        for entry in self.inner.list(prefix):
            self._learn(entry)
            yield entry

    def stat(self, key: str) -> Entry:
        entry = self.inner.stat(key)
        self._learn(entry)
        return entry

    def _learn(self, entry: Entry) -> None:
        with self._lock:
            progress = self._progress.setdefault(entry.key, _Progress())
            if (progress.size, progress.etag) != (entry.size, entry.etag):
                self._progress[entry.key] = _Progress(entry.size, entry.etag)
                for window in [w for w in self._windows if w[0] == entry.key]:
                    del self._windows[window]
                for place in [p for p in self._chunks if p[0] == entry.key]:
                    del self._chunks[place]

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        if 0 < len(buffer) <= WINDOW and self._from_window(key, start, buffer):
            return
        if len(buffer) >= CHUNK:
            # Whoever reads so much at once reads in parallel himself.
            self.inner.readinto(key, start, buffer)
            return
        self._plan(key, start, len(buffer))
        done = 0
        while done < len(buffer):
            done += self._serve(key, start + done, buffer[done:])

    def stream(self, key: str, start: int, end: int) -> AbstractContextManager[Fill]:
        # Whoever says what he will read needs nobody to guess it.
        return self.inner.stream(key, start, end)

    def _from_window(self, key: str, start: int, buffer: memoryview) -> bool:
        """Serve a small read from a neighbourhood, fetched once; False where the size is not known or does not reach."""
        end = start + len(buffer)
        with self._lock:
            progress = self._progress.get(key)
            for (name, begin), data in self._windows.items():
                if name == key and begin <= start and end <= begin + len(data):
                    buffer[:] = data[start - begin : end - begin]
                    self._windows.move_to_end((name, begin))
                    return True
        if len(buffer) > WINDOW // 2 or progress is None or progress.size is None or end > progress.size:
            return False
        # The end of a file is read backwards: a directory lies before its own end.
        begin = max(0, min(start, progress.size - WINDOW))
        data = self.inner.read(key, begin, min(WINDOW, progress.size - begin))
        with self._lock:
            self._windows[key, begin] = data
            while len(self._windows) > WINDOWS:
                self._windows.popitem(last=False)
        buffer[:] = data[start - begin : end - begin]
        return True

    def _serve(self, key: str, at: int, buffer: memoryview) -> int:
        """Fill the beginning of `buffer` from what was fetched ahead, or from the store; return how much."""
        index = at // CHUNK
        with self._lock:
            chunk = self._chunks.get((key, index))
            following = self._chunks.get((key, index + 1))
        if chunk is None or not chunk.start <= at < chunk.end:
            # Up to where fetched bytes begin, in one request.
            if chunk is not None and at >= chunk.end:
                chunk = None
            stop = (
                chunk.start
                if chunk is not None
                else following.start
                if following is not None
                else at + len(buffer)
            )
            size = min(len(buffer), stop - at)
            self.inner.readinto(key, at, buffer[:size])
            return size
        try:
            data = chunk.data.result()
        except StoreError:
            # Ask again in the reader's own name: then the error, if it stays, is about what it asked for.
            self._discard(key, index)
            return 0
        size = min(len(buffer), chunk.end - at)
        buffer[:size] = memoryview(data)[at - chunk.start : at - chunk.start + size]
        with self._lock:
            chunk.left -= size
            if chunk.left <= 0:
                self._chunks.pop((key, index), None)
        return size

    def _plan(self, key: str, start: int, size: int) -> None:
        """Note a read and, when its key is being read in sequence, send for what comes after it."""
        with self._lock:
            self._reads += 1
            progress = self._progress.setdefault(key, _Progress())
            sequential = start == 0 or any(0 <= start - end <= GAP for end in progress.ends)
            progress.total += size
            progress.ends.append(start + size)
            if not sequential or progress.total < RUN or progress.size is None:
                return
            at, limit = start + size, progress.size
            for index in range(at // CHUNK, at // CHUNK + AHEAD + 1):
                begin, end = max(at, index * CHUNK), min(limit, (index + 1) * CHUNK)
                # What was fetched once has been read, or is waiting to be.
                if begin >= end or index in progress.fetched:
                    continue
                if len(self._chunks) >= BUFFERS and not self._evict():
                    return
                progress.fetched.add(index)
                data = self._workers().submit(self._fetch, key, begin, end - begin)
                self._chunks[key, index] = _Chunk(begin, end, data, self._reads, end - begin)

    def _evict(self) -> bool:
        """Make room: a chunk that arrived and was read in part, or that nobody came for. The lock is held."""
        for place, chunk in self._chunks.items():
            touched = chunk.left < chunk.end - chunk.start
            if chunk.data.done() and (touched or self._reads - chunk.born > STALE):
                del self._chunks[place]
                return True
        return False

    def _fetch(self, key: str, start: int, length: int) -> bytearray:
        data = bytearray(length)
        self.inner.readinto(key, start, memoryview(data))
        return data

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="ckptguard-read-ahead")
        return self._pool

    def _discard(self, key: str, index: int) -> None:
        with self._lock:
            self._chunks.pop((key, index), None)

    def fresh(self, key: str) -> Store | None:
        return self.inner.fresh(key)

    def forget(self) -> None:
        """Throw away everything fetched ahead, so that the next read sees what is there now."""
        with self._lock:
            self._chunks.clear()
            self._windows.clear()
            self._progress.clear()
        forget = getattr(self.inner, "forget", None)
        if forget is not None:
            forget()

    def close(self) -> None:
        self.forget()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        close = getattr(self.inner, "close", None)
        if close is not None:
            close()

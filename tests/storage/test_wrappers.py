"""Stores around stores: the rate limit, reading ahead, and the faults that tests make."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptguard.errors import ShortRead, StoreError, UsageError
from ckptguard.ports import Store, Traits, WritableStore
from ckptguard.storage import open_store
from ckptguard.storage._wrapper import Wrapper
from ckptguard.storage.limited import Limited
from ckptguard.storage.local import LocalStore
from ckptguard.storage.readahead import BUFFERS, CHUNK, WINDOW, ReadAhead
from ckptguard.testing import FaultyStore

MIB = 1 << 20
DATA = os.urandom(MIB) * 70 + b"end"


class Counting(Wrapper):
    """Counts reads, and how many bytes are under way at the same time at most."""

    reads = 0
    under_way = 0
    most = 0

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.lock = threading.Lock()

    @property
    def traits(self) -> Traits:
        return Traits(local=False, request_bytes=64 << 10)

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        with self.lock:
            self.reads += 1
            self.under_way += len(buffer)
            self.most = max(self.most, self.under_way)
        super().readinto(key, start, buffer)
        with self.lock:
            self.under_way -= len(buffer)


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    (tmp_path / "big").write_bytes(DATA)
    return LocalStore(tmp_path)


class TestLimited:
    def test_all_threads_together_keep_the_rate(self, local: LocalStore) -> None:
        now = [0.0]
        slept: list[float] = []
        store = Limited(local, 10 * MIB, clock=lambda: now[0], sleep=slept.append)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: store.read("big", n * 5 * MIB, 5 * MIB), range(8)))
        # 40 MiB are booked at 10 MiB/s; the clock stands still, so the last piece waits for 3.9 seconds.
        assert max(slept) == pytest.approx(3.9)

    def test_the_bytes_are_the_same_and_other_abilities_stay(self, local: LocalStore) -> None:
        store = Limited(local, 1e12)
        assert store.read("big", 123, 5 * MIB) == DATA[123 : 123 + 5 * MIB]
        assert isinstance(store, Store) and isinstance(store, WritableStore)
        store.put("new", b"1")
        assert store.read("new") == b"1"

    def test_a_rate_must_be_one(self, local: LocalStore) -> None:
        with pytest.raises(UsageError, match="must be positive"):
            Limited(local, 0)

    def test_it_is_what_open_store_makes_of_a_rate(self, tmp_path: Path) -> None:
        assert isinstance(open_store(str(tmp_path), max_rate=1e6), Limited)


class TestReadAhead:
    def test_a_sequential_reader_makes_few_requests_and_bounded_memory(self, local: LocalStore) -> None:
        inner = Counting(local)
        store = ReadAhead(inner)
        store.stat("big")
        got = b"".join(store.read("big", at, min(MIB, len(DATA) - at)) for at in range(0, len(DATA), MIB))
        assert got == DATA
        assert inner.reads < 20
        assert inner.most <= BUFFERS * CHUNK
        store.close()

    def test_readers_that_share_a_file_fetch_it_once(self, local: LocalStore) -> None:
        inner = Counting(local)
        store = ReadAhead(inner)
        store.stat("big")

        def segment(begin: int) -> bytes:
            end = min(begin + 16 * MIB, len(DATA))
            return b"".join(store.read("big", at, min(MIB, end - at)) for at in range(begin, end, MIB))

        with ThreadPoolExecutor(3) as pool:
            assert b"".join(pool.map(segment, range(0, len(DATA), 16 * MIB))) == DATA
        assert inner.reads < 40
        store.close()

    def test_small_reads_share_a_request(self, local: LocalStore) -> None:
        inner = Counting(local)
        store = ReadAhead(inner)
        store.stat("big")
        for at in range(0, WINDOW, 512):
            assert store.read("big", at, 8) == DATA[at : at + 8]
        for at in range(len(DATA) - 8, len(DATA) - WINDOW, -512):
            assert store.read("big", at, 8) == DATA[at : at + 8]
        assert inner.reads == 2

    def test_what_was_replaced_is_not_served_from_memory(self, local: LocalStore) -> None:
        store = ReadAhead(local)
        store.stat("big")
        assert store.read("big", 0, 8) == DATA[:8]
        local.put("big", b"12345678")
        store.stat("big")
        assert store.read("big", 0, 8) == b"12345678"

    def test_an_error_is_that_of_the_read(self, local: LocalStore) -> None:
        store = ReadAhead(FaultyStore(local, cut={"big": 40 * MIB}))
        store.stat("big")
        with pytest.raises(ShortRead, match="made to end at byte 41943040"):
            for at in range(0, len(DATA), MIB):
                store.read("big", at, MIB)
        store.close()


def test_a_faulty_store_does_what_it_says(local: LocalStore) -> None:
    store = FaultyStore(local, flip={"big": 5}, fail_first={"big": 1})
    with pytest.raises(StoreError, match="made to fail"):
        store.read("big", 0, 10)
    assert store.read("big", 0, 10)[5] == DATA[5] ^ 0x10

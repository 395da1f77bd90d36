"""Contract suites that every implementation of an extension point inherits, and wrappers that make faults.

A test of a new backend is short: it inherits `StoreContract` and says how a store with given files is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from ckptguard.errors import KeyNotFound, Refused, ShortRead, StoreError
from ckptguard.model import Entry
from ckptguard.ports import Store, WritableStore
from ckptguard.storage._wrapper import Wrapper

# === Stores ===========================================================================================

MakeStore = Callable[[Mapping[str, bytes]], Store]


class FaultyStore(Wrapper):
    """A real store below, and one fault on top: wrong bytes, a missing end, a refusal, an error now and then.

    `flip` changes the byte at that offset of a key whenever it is read; `cut` makes a key end there; `deny` refuses
    keys; `fail_first` fails that many reads of a key before the first one succeeds.
    """

    def __init__(
        self,
        inner: Store,
        *,
        flip: Mapping[str, int] | None = None,
        flip_once: Mapping[str, int] | None = None,
        cut: Mapping[str, int] | None = None,
        deny: Mapping[str, StoreError] | None = None,
        fail_first: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(inner)
        self.flip, self.flip_once = dict(flip or {}), dict(flip_once or {})
        self.cut, self.deny, self.fail_first = dict(cut or {}), dict(deny or {}), dict(fail_first or {})
        self._lock = threading.Lock()

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        if key in self.deny:
            raise self.deny[key]
        with self._lock:
            if self.fail_first.get(key, 0) > 0:
                self.fail_first[key] -= 1
                raise StoreError(f"{key}: made to fail")
        end = start + len(buffer)
        if key in self.cut and end > self.cut[key]:
            raise ShortRead(
                f"{key}: made to end at byte {self.cut[key]}, {end - self.cut[key]} more were expected"
            )
        self.inner.readinto(key, start, buffer)
        for table, once in ((self.flip, False), (self.flip_once, True)):
            at = table.get(key, -1)
            if start <= at < end:
                buffer[at - start] ^= 0x10
                if once:
                    del table[key]

    def fresh(self, key: str) -> Store | None:
        return self


class StoreContract:
    """What every store promises. A subclass has a fixture `make_store`: it makes a store with these files in it."""

    FILES: Mapping[str, bytes] = {
        "run/checkpoint-10/model.bin": bytes(range(256)) * 40,
        "run/checkpoint-10/config.json": b"{}",
        "run/checkpoint-9/empty": b"",
        "run/latest": b"checkpoint-10\n",
        "running/other": b"not below run",
        "run/with space+plus%25é.bin": b"named by a human",
    }

    def test_lists_every_file_with_its_size_and_nothing_else(self, make_store: MakeStore) -> None:
        store = make_store(self.FILES)
        found = {e.key: e.size for e in store.list() if e.kind == "file"}
        assert found == {key: len(data) for key, data in self.FILES.items()}

    def test_a_prefix_is_a_folder_and_not_the_beginning_of_a_name(self, make_store: MakeStore) -> None:
        store = make_store(self.FILES)
        assert all(e.key.startswith("run/") for e in store.list("run"))
        below = {e.key for e in store.list("run/checkpoint-1") if e.kind == "file"}
        assert below == set()

    def test_an_absent_folder_lists_nothing(self, make_store: MakeStore) -> None:
        assert list(make_store(self.FILES).list("run/nowhere")) == []

    def test_stat_says_what_the_listing_says(self, make_store: MakeStore) -> None:
        store = make_store(self.FILES)
        for entry in store.list():
            if entry.kind == "file":
                now = store.stat(entry.key)
                assert (now.size, now.etag) == (entry.size, entry.etag)
                assert abs(now.modified - entry.modified) < 2

    def test_reads_exactly_what_was_asked_for(self, make_store: MakeStore) -> None:
        store, data = make_store(self.FILES), self.FILES["run/checkpoint-10/model.bin"]
        key = "run/checkpoint-10/model.bin"
        assert store.read(key) == data
        assert store.read(key, 7, 1000) == data[7:1007]
        assert store.read(key, 5000) == data[5000:]
        assert store.read(key, len(data), 0) == b""
        assert store.read("run/checkpoint-9/empty") == b""
        buffer = bytearray(600)
        store.readinto(key, 9000, memoryview(buffer)[100:600])
        assert buffer == bytes(100) + data[9000:9500]

    def test_names_survive_whatever_characters_they_have(self, make_store: MakeStore) -> None:
        assert make_store(self.FILES).read("run/with space+plus%25é.bin") == b"named by a human"

    def test_reading_past_the_end_is_a_short_read(self, make_store: MakeStore) -> None:
        store = make_store(self.FILES)
        for start in (10_000, 10_240, 99_999):
            try:
                store.read("run/checkpoint-10/model.bin", start, 1000)
            except ShortRead:
                continue
            raise AssertionError(f"no ShortRead at {start}")

    def test_a_missing_key_is_named(self, make_store: MakeStore) -> None:
        store = make_store(self.FILES)
        for ask in (store.stat, store.read, lambda key: store.read(key, 0, 4)):
            try:
                ask("run/absent.bin")
            except KeyNotFound as error:
                assert "absent.bin" in error.message
                continue
            raise AssertionError("no KeyNotFound")

    def test_many_threads_read_what_is_there(self, make_store: MakeStore) -> None:
        store, key = make_store(self.FILES), "run/checkpoint-10/model.bin"
        data = self.FILES[key]

        def read(at: int) -> bool:
            return store.read(key, at * 97, 500) == data[at * 97 : at * 97 + 500]

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(read, range(100)))

    def test_a_fresh_store_reads_the_same_bytes(self, make_store: MakeStore) -> None:
        again = make_store(self.FILES).fresh("run/latest")
        assert again is None or again.read("run/latest") == b"checkpoint-10\n"


class WritableStoreContract(StoreContract):
    """What every store promises that commands may write to."""

    def writable(self, make_store: MakeStore) -> WritableStore:
        store = make_store(self.FILES)
        assert isinstance(store, WritableStore)
        return store

    def test_puts_a_new_object_and_replaces_one(self, make_store: MakeStore) -> None:
        store = self.writable(make_store)
        entry = store.put("run/new/file.json", b"one")
        assert (entry.key, entry.size) == ("run/new/file.json", 3)
        store.put("run/new/file.json", b"three")
        assert store.read("run/new/file.json") == b"three"
        assert {e.key for e in store.list("run/new") if e.kind == "file"} == {"run/new/file.json"}

    def test_only_one_of_two_writers_creates(self, make_store: MakeStore) -> None:
        store = self.writable(make_store)

        def create(content: bytes) -> bool:
            try:
                store.put("run/claim", content, if_absent=True)
            except Refused:
                return False
            return True

        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(create, (b"a", b"b", b"c", b"d")))
        assert won.count(True) == 1
        assert store.read("run/claim") == (b"a", b"b", b"c", b"d")[won.index(True)]

    def test_deletes_and_then_it_is_not_there(self, make_store: MakeStore) -> None:
        store = self.writable(make_store)
        store.delete("run/latest")
        keys: Iterator[Entry] = store.list("run")
        assert "run/latest" not in {e.key for e in keys}
        try:
            store.stat("run/latest")
        except KeyNotFound:
            return
        raise AssertionError("no KeyNotFound")

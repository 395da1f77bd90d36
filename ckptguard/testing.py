"""Contract suites that every implementation of an extension point inherits, and wrappers that make faults.

A test of a new backend is short: it inherits `StoreContract` and says how a store with given files is made.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckptguard.codes import CODES
from ckptguard.errors import KeyNotFound, Refused, ShortRead, StoreError
from ckptguard.model import (
    CheckpointFacts,
    Directory,
    Entry,
    Evidence,
    FileFacts,
    Manifest,
    ManifestFile,
    Role,
    State,
)
from ckptguard.ports import Check, RunCheck, RunSubject, Store, Subject, WritableStore
from ckptguard.storage._wrapper import Wrapper

# === Stores ===========================================================================================

MakeStore = Callable[[Mapping[str, bytes]], Store]


class FaultyStore(Wrapper):
    """A real store below, and one fault on top: wrong bytes, a missing end, a refusal, an error now and then.

    `flip` changes the byte at that offset of a key whenever it is read; `cut` makes a key end there; `deny` refuses
    keys (a KeyNotFound there makes a file disappear after it was listed); `fail_first` fails that many reads of a key
    before the first one succeeds; `slow` waits that many seconds before every read.
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
        slow: float = 0.0,
    ) -> None:
        super().__init__(inner)
        self.flip, self.flip_once = dict(flip or {}), dict(flip_once or {})
        self.cut, self.deny, self.fail_first = dict(cut or {}), dict(deny or {}), dict(fail_first or {})
        self.slow = slow
        self._lock = threading.Lock()

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        if self.slow:
            time.sleep(self.slow)
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

    def test_a_stream_gives_the_bytes_in_order(self, make_store: MakeStore) -> None:
        store, key = make_store(self.FILES), "run/checkpoint-10/model.bin"
        came = bytearray(9000)
        view = memoryview(came)
        with store.stream(key, 1000, 10_000) as fill:
            for at in range(0, 9000, 700):
                fill(view[at : at + 700])
        assert came == self.FILES[key][1000:10_000]
        with store.stream(key, 0, 10_240) as fill:
            fill(view[:10])  # whoever has seen enough lets go
        assert came[:10] == self.FILES[key][:10]

    def test_a_stream_past_the_end_is_a_short_read_and_of_nothing_a_missing_key(
        self, make_store: MakeStore
    ) -> None:
        store = make_store(self.FILES)
        for key, expected in (("run/checkpoint-10/model.bin", ShortRead), ("run/absent.bin", KeyNotFound)):
            try:
                with store.stream(key, 10_000, 11_000) as fill:
                    fill(memoryview(bytearray(1000)))
            except expected:
                continue
            raise AssertionError(f"{key}: no {expected.__name__}")

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


# === Checks ===========================================================================================


class CheckContract:
    """What every check promises. A subclass has a fixture `check`."""

    HEADINGS = ("Finds:", "Why it matters:", "Example:", "What to do:", "Blind spots:")

    def test_says_what_it_finds_and_what_it_cannot(self, check: Check | RunCheck) -> None:
        text = type(check).__doc__ or ""
        missing = [heading for heading in self.HEADINGS if heading not in text]
        assert not missing, f"the docstring of {type(check).__name__} lacks {missing}"
        assert text.split("\n")[0].strip(), "the first line says what is checked"

    def test_has_a_name_and_codes_of_the_contract(self, check: Check | RunCheck) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9-]*", check.name)
        assert check.codes, "a check that finds nothing is none"
        assert set(check.codes) <= CODES.keys()

    def test_speaks_in_its_own_codes_also_where_nothing_is_known(self, check: Check | RunCheck) -> None:
        """A checkpoint of which nothing was read makes no check raise, nor say what it does not announce."""
        subject: Any = nothing_known() if hasattr(check, "needs") else nothing_seen()
        assert {f.code for f in check.run(subject)} <= set(check.codes)

    def test_is_pure(self, check: Check | RunCheck) -> None:
        """The same facts give the same findings, and the check keeps nothing of them."""
        before = dict(vars(check))
        subject: Any = nothing_known() if hasattr(check, "needs") else nothing_seen()
        assert list(check.run(subject)) == list(check.run(subject))
        assert dict(vars(check)) == before


def nothing_known() -> Subject:
    """A checkpoint with one file that was not read, alone in its run."""
    entry = Entry("run/checkpoint-1/model.safetensors", 100, 0.0)
    manifest = Manifest(
        "run/checkpoint-1",
        "unknown",
        (ManifestFile("model.safetensors", entry, Role.MODEL, "safetensors"),),
        step=1,
    )
    files = {"model.safetensors": FileFacts("model.safetensors", Evidence.LISTING)}
    facts = CheckpointFacts(manifest, files, State(), Evidence.CONTENT)
    return Subject(facts, (facts,), (), now=1e9)


def nothing_seen() -> RunSubject:
    """A run without a checkpoint."""
    return RunSubject(Directory("", {}, {}), (), (), (), (), (), now=1e9, grace=0.0)

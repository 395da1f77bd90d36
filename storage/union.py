"""Several directories seen as one: shards that lie on the disks of several nodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from ckptguard.errors import KeyNotFound
from ckptguard.model import Entry
from ckptguard.ports import Fill, Store, Traits


class Union:
    """The keys of all `stores`. Where several have a key, the first one's counts: that of the root that was named first.

    `conflicts` names the keys that another root has with another size: every node wrote its own.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = tuple(stores)
        self.url = " + ".join(s.url for s in stores)
        self.conflicts: set[str] = set()
        self._home: dict[str, Store] = {}
        self._lock = threading.Lock()

    @property
    def traits(self) -> Traits:
        return self.stores[0].traits

    def list(self, prefix: str = "") -> Iterator[Entry]:
        found: dict[str, Entry] = {}
        for store in self.stores:
            try:
                for entry in store.list(prefix):
                    known = found.setdefault(entry.key, entry)
                    if known is entry and entry.kind != "directory":
                        self._remember(entry.key, store)
                    elif known.size != entry.size:
                        self.conflicts.add(entry.key)
            except KeyNotFound:
                continue  # this root has nothing there; another may
        yield from (found[key] for key in sorted(found))

    def _remember(self, key: str, store: Store) -> None:
        with self._lock:
            self._home[key] = store

    def _of(self, key: str) -> Store:
        with self._lock:
            known = self._home.get(key)
        if known is not None:
            return known
        for store in self.stores:
            try:
                store.stat(key)
            except KeyNotFound:
                continue
            self._remember(key, store)
            return store
        raise KeyNotFound(f"{key}: in none of {self.url}")

    def stat(self, key: str) -> Entry:
        return self._of(key).stat(key)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._of(key).read(key, start, length)

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        self._of(key).readinto(key, start, buffer)

    def stream(self, key: str, start: int, end: int) -> AbstractContextManager[Fill]:
        return self._of(key).stream(key, start, end)

    def fresh(self, key: str) -> Store | None:
        return self._of(key).fresh(key)

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> Entry:
        """What is kept of a union lies in its first root."""
        entry: Entry = self.stores[0].put(key, data, if_absent=if_absent, if_match=if_match)  # type: ignore[attr-defined]
        self._remember(key, self.stores[0])
        return entry

    def delete(self, key: str) -> None:
        self._of(key).delete(key)  # type: ignore[attr-defined]

    def forget(self) -> None:
        with self._lock:
            self._home.clear()
        for store in self.stores:
            forget = getattr(store, "forget", None)
            if forget is not None:
                forget()

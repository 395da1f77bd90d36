"""What all wrappers share: a Store around a Store that passes everything on that it does not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from ckptguard.model import Entry
from ckptguard.ports import Fill, Store, Traits
from ckptguard.storage._base import InOrder


class Wrapper:
    """A Store around `inner`. What only some stores can do (proof, put, uploads...) is passed on as it is."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    @property
    def url(self) -> str:
        return self.inner.url

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return self.inner.list(prefix)

    def stat(self, key: str) -> Entry:
        return self.inner.stat(key)

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        self.inner.readinto(key, start, buffer)

    def stream(self, key: str, start: int, end: int) -> AbstractContextManager[Fill]:
        # Not the inner store's: what this wrapper does to a read must not be left out.
        return InOrder(self, key, start)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if length is None:
            length = max(0, self.stat(key).size - start)
        buffer = bytearray(length)
        self.readinto(key, start, memoryview(buffer))
        return bytes(buffer)

    def fresh(self, key: str) -> Store | None:
        return self.inner.fresh(key)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

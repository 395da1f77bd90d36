"""Reads what was appended to a log since the last time. A torn last line waits until it is whole."""

from __future__ import annotations

from dataclasses import dataclass

from ckptguard.model import Entry
from ckptguard.ports import Store

MOST = 32 << 20
"""Of a log that grew by more, the end is read: a service that starts late needs the present, not all of the past."""


@dataclass(frozen=True, slots=True)
class Tail:
    """New bytes up to the last whole line, and where to go on. `fresh`: the file began anew."""

    data: bytes
    position: int
    fresh: bool


def tail(store: Store, entry: Entry, position: int) -> Tail:
    """What is new. A file that is shorter than before was replaced: it is read from its beginning. Raises StoreError."""
    fresh = entry.size < position
    start = 0 if fresh else position
    if entry.size - start > MOST:
        start = entry.size - MOST
    data = store.read(entry.key, start, entry.size - start) if entry.size > start else b""
    if start not in (0, position):
        # Begun in the middle of a line.
        skipped = data.find(b"\n") + 1
        data, start = data[skipped:], start + skipped
    whole = data.rfind(b"\n") + 1
    return Tail(data[:whole], start + whole, fresh)

"""What the tests of the log readers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ckptguard.logs import read_logs
from ckptguard.model import Directory, Entry, LogRow
from ckptguard.storage.local import LocalStore


def _directory(path: str, entries: Iterable[Entry]) -> Directory:
    files: dict[str, Entry] = {}
    below: dict[str, list[Entry]] = {}
    for entry in entries:
        head, slash, _ = entry.key[len(path) + 1 if path else 0 :].partition("/")
        if slash:
            below.setdefault(head, []).append(entry)
        elif entry.kind != "directory":
            files[head] = entry
    dirs = {name: _directory(f"{path}/{name}" if path else name, inside) for name, inside in below.items()}
    return Directory(path, files, dirs)


@pytest.fixture
def logged() -> Callable[[Path], tuple[LogRow, ...]]:
    """What `read_logs` finds in a folder."""

    def read(folder: Path) -> tuple[LogRow, ...]:
        store = LocalStore(folder)
        return read_logs(store, _directory("", store.list()))

    return read

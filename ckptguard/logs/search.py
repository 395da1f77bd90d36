"""Finds the metric log of a run by its names, and reads it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType

from ckptguard.errors import StoreError
from ckptguard.logs._base import other_phase, whole
from ckptguard.logs.csv import Csv
from ckptguard.logs.jsonl import JsonLines
from ckptguard.logs.steplog import StepLog
from ckptguard.logs.tensorboard import TensorBoard
from ckptguard.logs.trainer_state import TrainerState
from ckptguard.model import Directory, Entry, LogRow
from ckptguard.ports import LogReader, Store

OURS = ".ckptguard"
MAX_BYTES = 256 << 20
"""Of a longer log the end is read: it is the end that a resume continues."""
PEEK = 1 << 16
_DEPTH = 4
_PREFERRED = re.compile(r"(?:metrics?|train(?:er|ing)?[_-]?(?:log|metrics)|log|history)(?:\.rank)?[_-]?0?\.")
_DATED = re.compile(r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)?[0-9]+")
_CANDIDATES = 64
"""So many files are looked into at most: a folder of training data may hold millions that are named like logs."""
_READERS: tuple[LogReader, ...] = (StepLog(), TrainerState(), TensorBoard(), Csv(), JsonLines())


def read_logs(store: Store, directory: Directory) -> tuple[LogRow, ...]:
    """The rows of the run's metric log, in the order in which they were written; () where there is none. Never raises.

    The first kind that has rows counts: our step log, JSON lines, CSV, TensorBoard, the Trainer's own state. Repeated
    steps (of killed and resumed attempts) are kept. Rows of several ranks carry `rank` in `extra`; events and
    evaluations are rows without a loss.
    """
    prefix = f"{directory.path}/" if directory.path else ""
    entries = [
        e
        for e in directory.walk()
        if e.kind == "file" and e.size and e.key[len(prefix) :].count("/") <= _DEPTH
    ]
    known = {e.key for e in entries}
    entries += [e for e in _recorded(store, prefix) if e.key not in known]
    kinds: tuple[Callable[[Store, Sequence[Entry], str], tuple[LogRow, ...]], ...] = (
        _step_logs,
        _json_lines,
        _csv,
        _events,
        _trainer_state,
    )
    for kind in kinds:
        rows = kind(store, entries, prefix)
        if rows:
            return rows
    return ()


def _recorded(store: Store, prefix: str) -> list[Entry]:
    """Our own step logs: listings of checkpoints leave out the folder that they lie in."""
    try:
        return [e for e in store.list(f"{prefix}{OURS}") if e.kind == "file" and StepLog().claims(e.name)]
    except StoreError:
        return []


def read_log(store: Store, key: str) -> tuple[LogRow, ...]:
    """The rows of one log file that the user named, of whatever kind. Raises StoreError when it cannot be read."""
    name = key.rpartition("/")[2]
    data = _bytes(store, store.stat(key))
    claimed = [reader for reader in _READERS if reader.claims(name)]
    for reader in [*claimed, *(r for r in _READERS if r not in claimed)]:
        rows = tuple(reader.rows(data))
        if rows:
            return rows
    return ()


def _bytes(store: Store, entry: Entry) -> bytes:
    start = max(0, entry.size - MAX_BYTES)
    return store.read(entry.key, start, entry.size - start)


def _read(store: Store, entry: Entry, reader: LogReader) -> tuple[LogRow, ...]:
    try:
        return tuple(reader.rows(_bytes(store, entry)))
    except StoreError:
        return ()


def _step_logs(store: Store, entries: Sequence[Entry], prefix: str) -> tuple[LogRow, ...]:
    reader = StepLog()
    ours = [e for e in entries if e.key == f"{prefix}{OURS}/{e.name}" and reader.claims(e.name)]
    rows = [row for entry in ours for row in _read(store, entry, reader)]
    # Within an attempt of ours steps only rise, so this is the order of writing, with the ranks side by side.
    rows.sort(key=lambda row: (row.attempt or 0, row.step, whole(row.extra.get("rank")) or 0))
    return tuple(rows)


def _by_name(entries: Iterable[Entry], prefix: str, reader: LogReader) -> list[Entry]:
    """Candidates, most likely first: near the top, named like a log."""
    found = [e for e in entries if reader.claims(e.name) and f"/{OURS}/" not in f"/{e.key}"]
    return sorted(
        found, key=lambda e: (_PREFERRED.match(e.name) is None, e.key[len(prefix) :].count("/"), e.key)
    )


def _json_lines(store: Store, entries: Sequence[Entry], prefix: str) -> tuple[LogRow, ...]:
    reader = JsonLines()
    for entry in _by_name(entries, prefix, reader):
        # Training data is JSON lines too, and may be huge: the beginning tells.
        if any(_tells_of_training(row) for row in _beginning(store, entry, reader)):
            return _read(store, entry, reader)
    return ()


def _csv(store: Store, entries: Sequence[Entry], prefix: str) -> tuple[LogRow, ...]:
    reader = Csv()
    claimed = _by_name(entries, prefix, reader)
    for entry in claimed:
        if any(_tells_of_training(row) for row in _beginning(store, entry, reader)):
            # Lightning begins a new version_N folder at every start: all of them are the run's log.
            parts = [e for e in claimed if e.name == entry.name and _family(e) == _family(entry)]
            return tuple(row for part in sorted(parts, key=_natural) for row in _read(store, part, reader))
    return ()


def _family(entry: Entry) -> str:
    return re.sub(r"\d+", "#", entry.key)


def _natural(entry: Entry) -> tuple[int | str, ...]:
    parts = re.split(r"([0-9]+)", entry.key)
    return tuple(int(part) if place % 2 else part for place, part in enumerate(parts))


def _beginning(store: Store, entry: Entry, reader: LogReader) -> Sequence[LogRow]:
    try:
        return reader.rows(store.read(entry.key, 0, min(PEEK, entry.size)))
    except StoreError:
        return ()


def _tells_of_training(row: LogRow) -> bool:
    return row.loss is not None or row.lr is not None


def _events(store: Store, entries: Sequence[Entry], prefix: str) -> tuple[LogRow, ...]:
    """The event files of the folder that tells most of the training, one part after the other in the order of time.

    Folders that differ only in their dates and numbers are one: a writer begins a new one at every start.
    """
    reader = TensorBoard()
    families: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        folder = entry.key.rpartition("/")[0]
        if reader.claims(entry.name) and not other_phase(folder.rpartition("/")[2].lower()):
            families[_DATED.sub("#", folder)].append(entry)
    best: tuple[LogRow, ...] = ()
    for _, parts in sorted(families.items()):
        rows = tuple(
            replace(row, extra=MappingProxyType({**row.extra, "part": place}))
            for place, part in enumerate(sorted(parts, key=_begun))
            for row in _read(store, part, reader)
        )
        if sum(map(_tells_of_training, rows)) > sum(map(_tells_of_training, best)):
            best = rows
    return best


def _begun(entry: Entry) -> tuple[int, tuple[int | str, ...]]:
    """When an event file was begun, by its name."""
    found = re.search(r"tfevents\.([0-9]+)", entry.name)
    return (int(found[1]) if found else 0), _natural(entry)


def _trainer_state(store: Store, entries: Sequence[Entry], prefix: str) -> tuple[LogRow, ...]:
    """The longest history: the newest checkpoint's holds the steps of all before it."""
    reader = TrainerState()
    states = sorted((e for e in entries if reader.claims(e.name)), key=_natural, reverse=True)
    best: tuple[LogRow, ...] = ()
    for entry in states[:8]:
        rows = _read(store, entry, reader)
        if rows and (not best or rows[-1].step > best[-1].step):
            best = rows
    return best

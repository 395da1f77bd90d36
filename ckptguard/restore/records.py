"""What was recorded of a run beside its checkpoints: log, seal, environment. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptguard.errors import CkptguardError, FormatError, KeyNotFound, TargetNotFound, UsageError
from ckptguard.logs import read_log, read_logs
from ckptguard.model import Directory, Entry, LogRow
from ckptguard.places import place_of
from ckptguard.ports import Store
from ckptguard.restore.trials import flat_environment
from ckptguard.seals import Seal, read_seal, seal_file
from ckptguard.storage import open_store
from ckptguard.storage.local import LocalStore

LOG_DEPTH = 2


def find_seal(given: str, run: Path, path: Path) -> tuple[Seal | None, str]:
    """(the seal of this very save, or None; why a seal that is there cannot be used)."""
    try:
        if "://" in given:
            # Judged where it lies: a copy has times of its own.
            place = place_of(given)
            store, name = open_store(place.run), place.key
        else:
            store, name = LocalStore(run), path.relative_to(run).as_posix()
        seal = read_seal(store, "", name)
        if seal is None:
            return None, ""
        # Files are named relative to the checkpoint; a checkpoint of one file by its own name.
        head = name.rpartition("/")[0]
        base = f"{name}/" if path.is_dir() else f"{head}/" if head else ""
        entries = {}
        for file in seal.files:
            with contextlib.suppress(KeyNotFound):
                entries[file] = store.stat(f"{base}{file}")
    except FormatError as error:
        return None, error.args[0]
    if seal.stale_for(entries) and not _same_content(seal, path):
        return None, "its seal is of an earlier save of the same name"
    return seal, ""


def _same_content(seal: Seal, path: Path) -> bool:
    """Whether a copy, whose times are others, holds the very bytes that were sealed."""
    store = LocalStore(path if path.is_dir() else path.parent)
    for name, sealed in seal.files.items():
        try:
            entry = store.stat(name)
            if entry.size != sealed.size or seal_file(store, entry, seal.block_size).digest != sealed.digest:
                return False
        except CkptguardError:
            return False
    return bool(seal.files)


def find_rows(given: str, run: Path, log: str | None) -> tuple[LogRow, ...]:
    if log is None:
        if "://" in given:
            store = open_store(place_of(given).run)
            return read_logs(store, _remote_directory(store))
        return read_logs(LocalStore(run), directory(run))
    if "://" in log:
        head, _, name = log.rpartition("/")
        return read_log(open_store(head), name)
    path = Path(log)
    if not path.exists():
        raise TargetNotFound(f"{log}: no such log", "check --log")
    if path.is_dir():
        rows = read_logs(LocalStore(path), directory(path))
    else:
        rows = read_log(LocalStore(path.absolute().parent), path.name)
    if not rows:
        raise UsageError(
            f"--log {log}: no step of a training can be read from it", "name the metric log of the run"
        )
    return rows


def directory(root: Path, key: str = "", depth: int = LOG_DEPTH) -> Directory:
    """The listing in which logs are looked for: the run, its checkpoints, and what was recorded of it."""
    files: dict[str, Entry] = {}
    dirs: dict[str, Directory] = {}
    for item in sorted((root / key).iterdir() if key else root.iterdir()):
        below = f"{key}/{item.name}" if key else item.name
        if item.is_symlink():
            continue
        if item.is_dir() and depth:
            dirs[item.name] = directory(root, below, depth - 1)
        elif item.is_file():
            info = item.stat()
            files[item.name] = Entry(below, info.st_size, info.st_mtime)
    return Directory(key, files, dirs)


def _remote_directory(store: Store) -> Directory:
    """The same of an object store. What lies below `.ckptguard/` is in it, what lies deep in checkpoints is not."""
    near = [e for e in store.list() if e.kind == "file" and e.key.count("/") <= LOG_DEPTH]
    return _grouped("", near)


def _grouped(path: str, entries: Sequence[Entry]) -> Directory:
    """The entries below a folder, as a tree."""
    start = len(path) + 1 if path else 0
    files = {e.name: e for e in entries if "/" not in e.key[start:]}
    below: dict[str, list[Entry]] = {}
    for entry in entries:
        folder, slash, _ = entry.key[start:].partition("/")
        if slash:
            below.setdefault(folder, []).append(entry)
    dirs = {name: _grouped(f"{path}/{name}" if path else name, inner) for name, inner in below.items()}
    return Directory(path, files, dirs)


def recorded_environment(seal: Seal | None, rows: Sequence[LogRow]) -> Mapping[str, Any]:
    """Where the recorded steps were computed: by the seal, else by the log's last start before them."""
    if seal is not None and seal.environment:
        return flat_environment(seal.versions, seal.environment)
    starts = [row.extra for row in rows if row.extra.get("event") == "start"]
    kinds = {str(sorted(dict(start.get("environment") or {}).items())) for start in starts}
    if len(kinds) != 1 or not isinstance(starts[0].get("environment"), Mapping):
        return {}
    return flat_environment(starts[0].get("versions") or {}, starts[0]["environment"])

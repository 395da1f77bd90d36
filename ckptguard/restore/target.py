"""Finds everything around a checkpoint that a restore is compared with: its run, step, siblings, log, seal and batches.

Torch-free, and nothing is changed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckptguard.discover import group_runs
from ckptguard.errors import CkptguardError, FormatError, KeyNotFound, TargetNotFound
from ckptguard.inspect import Options, open_target, split_leftovers
from ckptguard.logs import read_log, read_logs
from ckptguard.model import Directory, Entry, LogRow, Manifest, Tensor
from ckptguard.places import place_of
from ckptguard.ports import Store
from ckptguard.record.batches import batches_key
from ckptguard.restore.held import METADATA, open_checkpoint
from ckptguard.restore.trials import flat_environment
from ckptguard.seals import OURS, Seal, read_seal, seal_file
from ckptguard.storage import open_store
from ckptguard.storage.local import LocalStore

_COUNTERS = ("global_step", "step", "iteration", "iter", "num_updates", "steps", "train_step", "n_iter", "it")
_INSIDE = ("trainer_state", "train_state", "training_state", "state", "progress", "meta", "metadata", "app")
_LOG_DEPTH = 2


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another checkpoint of the same series. `path` is absolute."""

    path: Path
    step: int


@dataclass(frozen=True, slots=True)
class Target:
    """A local checkpoint in its surroundings. `path` and `run` are absolute, `given` is what the user wrote."""

    given: str
    path: Path
    run: Path
    layout: str
    step: int | None
    siblings: tuple[Sibling, ...] = ()
    rows: tuple[LogRow, ...] = ()
    seal: Seal | None = None
    seal_trouble: str = ""
    batches: Path | None = None
    environment: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    gaps: tuple[str, ...] = ()
    processes: int = 1

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def attempt(self) -> int | None:
        return self.seal.attempt if self.seal is not None else None

    def earlier(self) -> tuple[Sibling, ...]:
        """Siblings before it, the nearest first."""
        before = [s for s in self.siblings if self.step is not None and s.step < self.step]
        return tuple(sorted(before, key=lambda s: -s.step))

    def next_within(self, steps: int) -> Sibling | None:
        """The nearest later sibling at most so many steps away."""
        if self.step is None:
            return None
        later = [s for s in self.siblings if self.step < s.step <= self.step + steps]
        return min(later, key=lambda s: s.step, default=None)


def find_target(given: str, log: str | None = None, staged: Path | None = None) -> Target:
    """The checkpoint and its surroundings. `staged` is where a distant one was copied to.

    Raises TargetNotFound, UsageError, StoreError.
    """
    path = staged if staged is not None else Path(given)
    if not path.exists():
        raise TargetNotFound(f"{given}: no such file or directory", "check the path; is the volume mounted?")
    path = path.absolute()
    run = run_of(path)
    step = step_of(path)
    seal, trouble = _seal(given, run, path)
    manifest, others = _neighbours(path)
    layout = layout_of(path, manifest)
    rows = _rows(given, run, log)
    if layout == "lightning" and not any(row.extra.get("event") for row in rows):
        # Its loggers count from 0: the row of the N-th step is called N - 1.
        rows = tuple(replace(row, step=row.step + 1) for row in rows)
    batches = run / batches_key("", path.relative_to(run).as_posix())
    return Target(
        given=given,
        path=path,
        run=run,
        layout=layout,
        step=seal.step if seal is not None and seal.step is not None else step,
        siblings=_siblings(path, others, manifest is not None and step is not None and manifest.step == step),
        rows=rows,
        seal=seal,
        seal_trouble=trouble,
        batches=batches if batches.is_file() else None,
        environment=recorded_environment(seal, rows),
        gaps=manifest.gaps if manifest is not None else (),
        processes=_processes(path, seal),
    )


def run_of(path: Path) -> Path:
    """The directory that holds what was recorded of the run, else its log, else the checkpoint's parent."""
    near = [path.parent, path.parent.parent]
    for folder in near:
        if (folder / OURS).is_dir():
            return folder
    for folder in near:
        if (
            any(folder.glob("*.jsonl"))
            or any(folder.glob("*.csv"))
            or (folder / "trainer_state.json").is_file()
        ):
            return folder
    return path.parent


def layout_of(path: Path, manifest: Manifest | None = None) -> str:
    """The layout's name. What a lone file is, its content says."""
    if path.is_file():
        try:
            tree = open_checkpoint(str(path)).tree(path.name)
        except CkptguardError:
            tree = None
        if isinstance(tree, Mapping) and "pytorch-lightning_version" in tree:
            return "lightning"
    return manifest.layout if manifest is not None else "unknown"


# --- the step ---------------------------------------------------------------------------------------------


def step_of(path: Path) -> int | None:
    """The optimizer step that a checkpoint states, in its content before its name; None where neither says."""
    stated = _stated_step(path)
    return stated if stated is not None else _named_step(path.name)


def _stated_step(path: Path) -> int | None:
    try:
        held = open_checkpoint(str(path))
        state = held.trainer_state()
        if state:
            return _whole(state.get("global_step"))
        if held.is_file:
            return _counter(held.tree(held.root.name))
        if METADATA in held.known:
            return _counter(held.tree(METADATA))
        for file in sorted(path.glob("*.pt")):
            if (step := _counter(held.tree(file.name))) is not None:
                return step
    except CkptguardError:
        return None  # the restore itself will say what is wrong with it
    return None


def _counter(tree: Any) -> int | None:
    if not isinstance(tree, Mapping):
        return None
    for name in _COUNTERS:
        if (step := _whole(tree.get(name))) is not None:
            return step
    for name in _INSIDE:
        inner = tree.get(name)
        if (
            isinstance(inner, Mapping)
            and (step := _counter({k: inner.get(k) for k in _COUNTERS})) is not None
        ):
            return step
    return None


def _whole(value: Any) -> int | None:
    if isinstance(value, Tensor):
        value = value.scalar()
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 0:
        return None
    return int(value) if value == int(value) else None


def _named_step(name: str) -> int | None:
    """The number that a name carries: the one after "step" or "iter", else the last one."""
    match = re.search(r"(?:step|iter(?:ation)?|ba)[=_-]?(\d+)", name)
    numbers = [match[1]] if match else re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None


def _neighbours(path: Path) -> tuple[Manifest | None, tuple[Manifest, ...]]:
    """(what the layouts make of the checkpoint, the finished checkpoints of its series), by names alone."""
    try:
        opened, root, manifests = open_target(str(path), Options())
    except CkptguardError:
        return None, ()
    own = next((m for m in manifests if m.path == opened.only), None)
    if own is None:
        return None, ()
    run = next((run for run in group_runs(root, manifests) if own in run.checkpoints), None)
    listed, _ = split_leftovers(run.checkpoints, opened.only) if run is not None else ([], [])
    base = Path(opened.store.url)
    same = [
        m for m in listed if m.series == own.series and m.finished and not m.temporary and m.path != own.path
    ]
    return own, tuple(replace(m, path=str((base / m.path).absolute())) for m in same)


def _siblings(path: Path, manifests: Sequence[Manifest], named: bool) -> tuple[Sibling, ...]:
    """The other checkpoints of the run whose step is known; by their names' pattern where no layout knows them.

    `named`: the names of this series state the step, so that no file has to be opened for it.
    """
    steps = {Path(m.path): m.step for m in manifests}
    others = list(steps)
    if not others:
        pattern = re.sub(r"\d+", "#", path.name)
        others = [
            other
            for other in sorted(path.parent.iterdir())
            if "#" in pattern and other.name != path.name and re.sub(r"\d+", "#", other.name) == pattern
        ]
    found = []
    for other in others:
        if other.is_symlink() or other.is_file() != path.is_file():
            continue
        step = steps.get(other) if named else None
        step = step_of(other) if step is None else step
        if step is not None:
            found.append(Sibling(other, step))
    return tuple(found)


def _processes(path: Path, seal: Seal | None) -> int:
    """How many processes trained: as recorded, else by the generators' files that each of them writes."""
    if seal is not None:
        stated = seal.topology.get("world_size") or seal.definitions.get("world_size")
        if isinstance(stated, int) and stated > 0:
            return stated
    files = (
        list(path.glob("rng_state_*.pth")) + list(path.glob("random_states_*.pkl")) if path.is_dir() else []
    )
    return max(1, len(files))


# --- what was recorded --------------------------------------------------------------------------------------


def _seal(given: str, run: Path, path: Path) -> tuple[Seal | None, str]:
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


def _rows(given: str, run: Path, log: str | None) -> tuple[LogRow, ...]:
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
        return read_logs(LocalStore(path), directory(path))
    return read_log(LocalStore(path.absolute().parent), path.name)


def directory(root: Path, key: str = "", depth: int = _LOG_DEPTH) -> Directory:
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
    near = [e for e in store.list() if e.kind == "file" and e.key.count("/") <= _LOG_DEPTH]
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


def listing(run: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file below the run: what must be the same before and after."""
    found = {}
    for path in sorted(run.rglob("*")):
        try:
            info = path.lstat()
        except OSError:
            continue
        if not path.is_dir() or path.is_symlink():
            found[path.relative_to(run).as_posix()] = (info.st_size, info.st_mtime_ns)
    return found

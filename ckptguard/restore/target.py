"""Finds everything around a checkpoint that a restore is compared with: its run, step, siblings, log, seal and batches.

Torch-free, and nothing is changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckptguard.discover import group_runs
from ckptguard.errors import CkptguardError, TargetNotFound, UsageError
from ckptguard.inspect import Options, open_target, split_leftovers
from ckptguard.model import LogRow, Manifest
from ckptguard.record.batches import batches_key
from ckptguard.restore.held import open_checkpoint
from ckptguard.restore.records import find_rows, find_seal, recorded_environment
from ckptguard.restore.steps import step_of
from ckptguard.seals import OURS, Seal


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
    seal, trouble = find_seal(given, run, path)
    manifest, others = _neighbours(path)
    if manifest is None and path.is_dir():
        refuse_run(given, path)
    layout = layout_of(path, manifest)
    rows = find_rows(given, run, log)
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


def refuse_run(given: str, path: Path) -> None:
    """Raise UsageError for a directory that is a run: it holds checkpoints of several steps, and is none."""
    try:
        _, _, manifests = open_target(str(path), Options())
    except CkptguardError:
        return
    inside = {m.step: m.path for m in manifests if m.path and m.step is not None}
    if len(inside) > 1:
        raise UsageError(
            f"{given} is no checkpoint, it holds several, such as {inside[max(inside)]}",
            f"name one of them; ckptguard preflight {given} names the one to resume from",
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


# --- the neighbours ---------------------------------------------------------------------------------------


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

"""From a listing to the runs and checkpoints in it, by names alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptguard.model import Directory, Manifest
from ckptguard.ports import Layout

MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Run:
    """The checkpoints of one run. `root` is the directory that holds them, or the one above that holds the log."""

    root: Directory
    checkpoints: tuple[Manifest, ...]


def find_checkpoints(directory: Directory, layouts: Sequence[Layout], depth: int = 0) -> list[Manifest]:
    """Every checkpoint at or below a directory. A directory that holds checkpoints is a run, never also one."""
    if depth > MAX_DEPTH:
        return []

    def resolve(inner: Directory) -> Manifest | None:
        claim = _claim(inner, layouts, resolve)
        return claim if claim is not None and claim.path == inner.path else None

    own = _claim(directory, layouts, resolve)
    parts = {f.entry.key for f in own.files} if own else set()
    below: list[Manifest] = []
    for _, sub in sorted(directory.dirs.items()):
        if own is not None and any(e.key in parts for e in sub.walk()):
            continue  # a part of the checkpoint that this directory is
        below += find_checkpoints(sub, layouts, depth + 1)
    if own is not None and not below:
        return [own]
    if own is not None and any(m.path.rpartition("/")[0] == directory.path for m in below):
        return below  # a run with its own final export at the top
    if own is not None:
        return [own, *below]
    files: list[Manifest] = []
    taken: set[str] = set()
    for layout in layouts:
        remaining = Directory(
            directory.path, {n: e for n, e in directory.files.items() if e.key not in taken}, directory.dirs
        )
        for manifest in layout.claim(remaining, resolve):
            if manifest.path != directory.path or not directory.path:
                files.append(manifest)
                taken |= {f.entry.key for f in manifest.files}
    # A layout may claim saves that span several folders (torchtune's one recipe state for all epochs).
    return files + [m for m in below if not any(f.entry.key in taken for f in m.files)]


def _claim(directory: Directory, layouts: Sequence[Layout], resolve) -> Manifest | None:  # type: ignore[no-untyped-def]
    """The layout that recognises this very directory as one checkpoint."""
    for layout in layouts:
        for manifest in layout.claim(directory, resolve):
            claims = bool(manifest.files) or not manifest.finished
            if manifest.path == directory.path and claims and not manifest.attributes.get("one_file"):
                return manifest
    return None


def group_runs(root: Directory, manifests: Iterable[Manifest]) -> list[Run]:
    """Checkpoints by run: those in one directory, with the log's directory as the run's root."""
    groups: dict[str, list[Manifest]] = {}
    for manifest in manifests:
        groups.setdefault(_home(root, manifest), []).append(manifest)
    return [Run(_directory(root, home) or root, tuple(members)) for home, members in sorted(groups.items())]


def _home(root: Directory, manifest: Manifest) -> str:
    parent = manifest.attributes.get("run") or manifest.path.rpartition("/")[0]
    above = parent.rpartition("/")[0]
    directory = _directory(root, above) if parent else None
    if directory is not None and any(
        n.endswith((".jsonl", ".csv")) or n.startswith("events.out") or n == "trainer_state.json"
        for n in directory.files
    ):
        return above
    return str(parent)


def _directory(root: Directory, path: str) -> Directory | None:
    here: Directory | None = root
    for part in path.split("/") if path else ():
        here = here.dirs.get(part) if here else None
    return here

"""From one listing of a target to its runs and what is seen of their checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptguard import registry
from ckptguard.discover import find_checkpoints, group_runs
from ckptguard.jobs.lifecycle import Look, fingerprint, look_of
from ckptguard.layouts._base import build_directory
from ckptguard.model import Directory, Entry, Manifest
from ckptguard.ports import Store
from ckptguard.seals import OURS


@dataclass(frozen=True, slots=True)
class Found:
    """One run below a target. `prefix` is its key in the store ("" for the target itself).

    `looks` by path relative to the run; `doubtful` are files that only their content can tell to be checkpoints;
    `surroundings` changes with whatever lies beside the checkpoints: pointers, left-overs, exports.
    """

    prefix: str
    looks: dict[str, Look]
    doubtful: str
    surroundings: str
    logs: tuple[Entry, ...]
    sealed: frozenset[str]


@dataclass(frozen=True, slots=True)
class Survey:
    runs: tuple[Found, ...]
    root: Directory


def survey(store: Store) -> Survey:
    """List a target and find its runs. Raises StoreError; never opens a file."""
    entries = list(store.list())
    theirs = [e for e in entries if OURS not in e.key.split("/")]
    root = build_directory(theirs)
    groups = group_runs(root, find_checkpoints(root, registry.layouts()))
    if len(groups) <= 1:
        # The one run of a target is the target, wherever below it the checkpoints lie.
        manifests = groups[0].checkpoints if groups else ()
        return Survey((_found("", manifests, entries, theirs),), root)
    found = [
        _found(run.root.path, run.checkpoints, _below(entries, run.root.path), _below(theirs, run.root.path))
        for run in groups
    ]
    return Survey(tuple(found), root)


def _below(entries: Iterable[Entry], prefix: str) -> list[Entry]:
    return [e for e in entries if not prefix or e.key.startswith(f"{prefix}/")]


def _found(prefix: str, manifests: Iterable[Manifest], entries: list[Entry], theirs: list[Entry]) -> Found:
    manifests = list(manifests)
    start = len(prefix) + 1 if prefix else 0
    looks = {m.path[start:]: _relative(look_of(m), start) for m in manifests if m.certain}
    inside = {f.entry.key for m in manifests for f in m.files}
    folders = {m.path for m in manifests}
    logs = tuple(e for e in entries if e.kind == "file" and is_log(e.key[start:]))
    logged = {e.key for e in logs}
    beside = [
        e
        for e in theirs
        if e.key not in inside
        and e.kind != "directory"
        and e.key not in logged
        and not _within(e.key, folders)
    ]
    seals = f"{prefix}/{OURS}/seals/" if prefix else f"{OURS}/seals/"
    sealed = frozenset(
        e.key[len(seals) :].removesuffix(".json").split("/rank-")[0]
        for e in entries
        if e.key.startswith(seals) and e.key.endswith(".json")
    )
    doubtful = fingerprint(f.entry for m in manifests if not m.certain for f in m.files)
    return Found(prefix, looks, doubtful, fingerprint(beside), logs, sealed)


def _within(key: str, folders: set[str]) -> bool:
    """A new file inside a checkpoint is the checkpoint's change, not its surroundings'."""
    parts = key.split("/")
    return any("/".join(parts[:n]) in folders for n in range(1, len(parts)))


def _relative(look: Look, start: int) -> Look:
    return Look(
        look.path[start:], look.layout, look.step, look.bytes, look.files, look.oldest, look.modified,
        look.fingerprint, look.whole,
    )  # fmt: skip


def is_log(path: str) -> bool:
    """Whether a file, by its path in the run, is a metric log that grows line by line."""
    name = path.rpartition("/")[2]
    parts = path.split("/")
    if OURS in parts:
        return name.startswith("steps-") and name.endswith(".jsonl") and parts[-2] == OURS
    return name.endswith(".jsonl") and len(parts) <= 3

"""Gathers what a prune must know of a run, and deletes what was planned and nothing else."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from ckptguard.errors import CkptguardError, KeyNotFound, Refused, StoreError
from ckptguard.inspect import Options, audit, split_leftovers
from ckptguard.logs import read_logs
from ckptguard.model import Entry, Evidence, Manifest, RunReport
from ckptguard.places import join
from ckptguard.ports import Store, WritableStore
from ckptguard.prune import Decided, Policy, Protection, plan_prune
from ckptguard.replica_look import Tree, compare_copies, list_tree
from ckptguard.replicas import CopyState
from ckptguard.replicate import LAST
from ckptguard.storage._base import Keeping, OpenUpload
from ckptguard.storage.opening import open_store

OURS = ".ckptguard"
TRASH = f"{OURS}/trash"


@dataclass(frozen=True, slots=True)
class Debris:
    """Something that is no checkpoint and that nobody goes on with."""

    kind: str
    path: str
    bytes: int
    idle: float
    keys: tuple[str, ...] = ()
    upload: OpenUpload | None = None
    store: Store | None = None

    def document(self) -> dict[str, Any]:
        return {"kind": self.kind, "path": self.path, "bytes": self.bytes, "idle_seconds": round(self.idle)}


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What would be deleted of a run. `tree` is the listing that was judged: what differs from it is not deleted."""

    root: str
    tree: Tree
    decided: tuple[Decided, ...]
    debris: tuple[Debris, ...]
    replica: str | None = None

    @property
    def freed(self) -> int:
        return sum(d.bytes for d in self.decided if d.delete) + sum(d.bytes for d in self.debris)


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of one planned deletion."""

    path: str
    error: CkptguardError | None = None


# --- planning -----------------------------------------------------------------------------------------


def plan_run(
    target: str, policy: Policy, options: Options, *, replica: str | None = None, older_than: float = 86400.0
) -> Iterator[PrunePlan]:
    """A plan for each run of a target. Raises TargetNotFound, NothingRecognised, UsageError, StoreError."""
    for report in audit(target, options):
        yield _plan(report, policy, options, replica, older_than)


def _plan(
    report: RunReport, policy: Policy, options: Options, replica: str | None, older_than: float
) -> PrunePlan:
    now = options.now()
    store = open_store(report.root)
    tree = list_tree(store)
    copies = list_tree(open_store(replica)) if replica else None
    proven: set[str] = set()
    if copies is not None:
        for copy in compare_copies(tree, copies, (), depth=Evidence.CONTENT, now=now):
            if all(f.state is CopyState.PROVEN for f in copy.files):
                proven.add(join(report.root, copy.path))
    protection = Protection(dict(_named(report, tree)), replica, proven)
    log = read_logs(store, tree.root)
    decided = plan_prune(report.checkpoints, policy, protection, log, now, options.grace)
    stores = [store] + ([copies.store] if copies is not None else [])
    debris = [*_left_overs(tree, now, older_than), *(d for s in stores for d in _uploads(s, now, older_than))]
    return PrunePlan(report.root, tree, decided, tuple(debris), replica)


def _named(report: RunReport, tree: Tree) -> Iterator[tuple[str, str]]:
    """Checkpoints that something names: pointers, links, the last decision from where to resume, a running process."""
    for pointer in tree.pointers():
        if pointer.resolved is not None:
            for manifest in _holding(tree, pointer.resolved):
                yield join(report.root, manifest.path), f"{pointer.entry.key} names it"
    for entry in tree.entries.values():
        if entry.kind == "link" and entry.resolved is not None:
            for manifest in _holding(tree, entry.resolved):
                if not entry.key.startswith(f"{manifest.path}/"):
                    yield join(report.root, manifest.path), f"{entry.key} is a link to it"
    decision = _last_decision(tree.store)
    running = _command_lines() if tree.store.traits.local else ""
    for verdict in report.checkpoints:
        if verdict.path in decision:
            yield verdict.path, "the last decision of preflight names it"
        absolute = str(Path(verdict.path).resolve())
        if absolute in running or f"\0{verdict.path}\0" in running:
            yield verdict.path, "a running process names it"


def _holding(tree: Tree, key: str) -> Iterator[Manifest]:
    for manifest in tree.checkpoints:
        if (
            manifest.path == key
            or any(f.entry.key == key for f in manifest.files)
            or key.startswith(f"{manifest.path}/")
        ):
            yield manifest


def _last_decision(store: Store) -> str:
    """The text of the newest decision, in which paths are looked for."""
    decisions = [e for e in store.list(f"{OURS}/decisions") if e.kind == "file" and e.size < 1 << 20]
    if not decisions:
        return ""
    newest = max(decisions, key=lambda e: e.modified)
    return store.read(newest.key, 0, newest.size).decode("utf-8", "replace")


def _command_lines() -> str:
    """The arguments of every process of this machine that may be seen."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append("\0" + path.read_bytes().decode("utf-8", "replace"))
    return "".join(found)


def _left_overs(tree: Tree, now: float, older_than: float) -> Iterator[Debris]:
    for run in tree.runs:
        for manifest in split_leftovers(run.checkpoints)[1]:
            if now - manifest.modified >= older_than:
                keys = tuple(f.entry.key for f in manifest.files)
                yield Debris(
                    "left-over", manifest.path, manifest.size, now - manifest.modified, keys, store=tree.store
                )
    groups: dict[str, list[Entry]] = {}
    for folder in (f"{OURS}/incoming", f"{OURS}/repair", TRASH):
        for entry in tree.store.list(folder):
            # The second part below the folder is the checkpoint that was on its way.
            if entry.kind == "file" and not entry.key.endswith(".lock"):
                groups.setdefault("/".join(entry.key.split("/")[:3]), []).append(entry)
    for path, entries in sorted(groups.items()):
        idle = now - max(e.modified for e in entries)
        # A whole checkpoint in `repair/` may be one that a killed repair took away: it is kept.
        if idle >= older_than and (not path.startswith(f"{OURS}/repair/") or path.endswith(".building")):
            size = sum(e.size for e in entries)
            yield Debris(
                "unfinished work of ours", path, size, idle, tuple(e.key for e in entries), store=tree.store
            )


def _uploads(store: Store, now: float, older_than: float) -> Iterator[Debris]:
    if isinstance(store, Keeping):
        for upload in store.uploads():
            idle = now - max(upload.last_activity, upload.started)
            if idle >= older_than:
                yield Debris(
                    "multipart upload", join(store.url, upload.key), upload.bytes, idle, (), upload, store
                )


# --- deleting -----------------------------------------------------------------------------------------


def apply_prune(plan: PrunePlan) -> Iterator[Removal]:
    """Delete what was planned, one thing after the other. What changed since the plan is left, and named."""
    manifests = {join(plan.root, m.path): m for m in plan.tree.checkpoints}
    for decided in plan.decided:
        if decided.delete:
            yield _removal(decided.path, partial(_remove_checkpoint, plan.tree, manifests[decided.path]))
    for debris in plan.debris:
        yield _removal(debris.path, partial(_remove_debris, debris, plan.tree))


def _removal(path: str, act: Callable[[], None]) -> Removal:
    try:
        act()
    except (Refused, StoreError) as error:
        return Removal(path, error)
    return Removal(path)


def _remove_checkpoint(tree: Tree, manifest: Manifest) -> None:
    """Out of sight in one step on a disk; on an object store the files that mark it as complete go first."""
    store = cast(WritableStore, tree.store)
    inside = f"{manifest.path}/"
    now = {e.key: e for e in store.list(manifest.path) if e.kind in ("file", "link")}
    before = {k: e for k, e in tree.entries.items() if k.startswith(inside)}
    lone = [f.entry for f in manifest.files if not f.entry.key.startswith(inside)]
    changed = [
        k for k in {*now, *before} if k not in now or k not in before or now[k].identity != before[k].identity
    ]
    changed += [e.key for e in lone if _identity(store, e.key) != e.identity]
    if changed:
        raise Refused(
            f"{manifest.path}: {sorted(changed)[0]} changed since it was judged; it was left", "prune again"
        )
    if store.traits.local:
        _trash(Path(store.url), [manifest.path, *(e.key for e in lone if e.key != manifest.path)])
    else:
        marks = {f.entry.key for f in manifest.files if f.role in LAST}
        keys = sorted({*now, *(e.key for e in lone)}, key=lambda k: (k not in marks, k))
        for key in keys:
            store.delete(key)
    for companion in ("seals/{}.json", "replicas/{}.json", "batches/{}.safetensors"):
        with contextlib.suppress(StoreError):
            store.delete(f"{OURS}/{companion.format(manifest.path)}")


def _identity(store: Store, key: str) -> Any:
    try:
        return store.stat(key).identity
    except KeyNotFound:
        return None


def _trash(root: Path, paths: Iterable[str]) -> None:
    for path in paths:
        here, there = root / path, root / TRASH / path
        if not here.exists() and not here.is_symlink():
            continue
        _delete(there)
        there.parent.mkdir(parents=True, exist_ok=True)
        try:
            here.rename(there)
        except OSError as error:
            raise StoreError(f"{path}: cannot be removed: {error.strerror}", "check permissions") from error
        _delete(there)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_debris(debris: Debris, tree: Tree) -> None:
    if debris.upload is not None and isinstance(debris.store, Keeping):
        debris.store.abort_upload(debris.upload)
        return
    store = cast(WritableStore, debris.store)
    known = tree.entries
    for key in debris.keys:
        if key in known and _identity(store, key) != known[key].identity:
            raise Refused(f"{key}: changed since it was looked at; it was left", "prune again")
    if store.traits.local:
        _delete(Path(store.url) / debris.path)
    for key in debris.keys:
        with contextlib.suppress(KeyNotFound):
            store.delete(key)


def document(plan: PrunePlan, removals: Mapping[str, Removal] | None) -> dict[str, Any]:
    """The plan, and, where it was applied, what became of it."""
    rows = [
        {"path": d.path, "step": d.step, "resume": d.resume, "bytes": d.bytes, "why": list(d.why)}
        for d in plan.decided
    ]
    errors = [r for r in (removals or {}).values() if r.error is not None]
    return {
        "schema": 1,
        "target": plan.root,
        "replica": plan.replica,
        "applied": removals is not None,
        "keep": [row for row, d in zip(rows, plan.decided, strict=True) if not d.delete],
        "delete": [row for row, d in zip(rows, plan.decided, strict=True) if d.delete],
        "debris": [d.document() for d in plan.debris],
        "bytes": plan.freed,
        "refused": [{"path": r.path, "message": str(r.error)} for r in errors],
    }

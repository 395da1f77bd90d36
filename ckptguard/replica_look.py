"""Looks at a run and its copy, and at the rules of the store it lies in; `ckptguard.replicas` decides what that means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptguard import registry
from ckptguard.codes import finding
from ckptguard.discover import Run, find_checkpoints, group_runs
from ckptguard.errors import KeyNotFound, StoreError
from ckptguard.layouts._base import build_directory
from ckptguard.model import Directory, Entry, Evidence, Finding, Manifest, Pointer, Severity
from ckptguard.ports import Store
from ckptguard.replicas import (
    ORPHANED,
    CheckpointCopy,
    copy_findings,
    file_copy,
    pointer_findings,
    retention_findings,
    upload_findings,
)
from ckptguard.storage._base import DeletedObject, Keeping, OpenUpload, Proving
from ckptguard.storage.checksums import Answer, Comparison, compare
from ckptguard.storage.transfer import differing_blocks, shared_checksum

OURS = ".ckptguard"


@dataclass(frozen=True, slots=True)
class Tree:
    """A store's listing: every file by key (ours left out), the checkpoints in it, its latest pointers."""

    store: Store
    entries: Mapping[str, Entry]
    root: Directory
    runs: tuple[Run, ...]

    @property
    def checkpoints(self) -> tuple[Manifest, ...]:
        return tuple(m for run in self.runs for m in run.checkpoints)

    def pointers(self) -> tuple[Pointer, ...]:
        """What the latest pointers of every directory that holds checkpoints name. Raises StoreError."""
        homes = (
            {m.path.rpartition("/")[0] for m in self.checkpoints}
            | {run.root.path for run in self.runs}
            | {""}
        )
        found: list[Pointer] = []
        for directory in filter(None, (_descend(self.root, home) for home in sorted(homes))):
            for layout in registry.layouts():
                found += layout.pointers(directory, self.store.read)
        return tuple({p.entry.key: p for p in found}.values())


def list_tree(store: Store) -> Tree:
    """List a whole store once. Raises StoreError."""
    entries = [e for e in store.list() if e.key.split("/", 1)[0] != OURS and f"/{OURS}/" not in e.key]
    root = build_directory(entries)
    runs = group_runs(root, find_checkpoints(root, registry.layouts()))
    return Tree(store, {e.key: e for e in entries if e.kind in ("file", "link")}, root, tuple(runs))


def compare_with_replica(
    source: Store,
    replica: Store,
    *,
    depth: Evidence,
    now: float,
    grace: float,
    only: Iterable[str] | None = None,
    jobs: int = 4,
    orphaned: float = ORPHANED,
    told: Callable[[Sequence[CheckpointCopy]], None] = lambda copies: None,
) -> tuple[Finding, ...]:
    """Findings on the copy of every checkpoint of `source` in `replica`, file by file, pointers and uploads included.

    `only` limits the look to these checkpoints (keys of the source). At `content` every file is proven by the replica's
    own checksums, or read on both sides; above it the checksums are compared that both sides state. `told` gets how far
    each copy is: that nothing was found is no proof. Raises StoreError when a side cannot be listed; a file that cannot be compared is named as unproven.
    """
    here, there = list_tree(source), list_tree(replica)
    # At once: what a pointer says later may not be listed yet.
    pointers = there.pointers()
    uploads = list(replica.uploads()) if isinstance(replica, Keeping) else []
    copies = compare_copies(here, there, uploads, depth=depth, now=now, only=only, jobs=jobs)
    told(copies)
    complete = {m.path: True for m in there.checkpoints} | {c.path: c.complete for c in copies}
    return (
        *copy_findings(copies, replica.url, now, grace, here=source.url),
        *upload_findings(uploads, now, orphaned),
        *pointer_findings(pointers, complete, replica.url, now, grace),
    )


def compare_copies(
    here: Tree,
    there: Tree,
    uploads: Iterable[OpenUpload],
    *,
    depth: Evidence,
    now: float,
    only: Iterable[str] | None = None,
    jobs: int = 4,
) -> list[CheckpointCopy]:
    """How far the copy of each checkpoint is. Raises StoreError when the replica's versions cannot be listed."""
    wanted = None if only is None else set(only)
    chosen = [m for m in here.checkpoints if wanted is None or m.path in wanted]
    deleted = {d.key: d for d in there.store.deleted()} if isinstance(there.store, Keeping) else {}
    open_now = {u.key: u for u in uploads}
    with ThreadPoolExecutor(jobs, thread_name_prefix="ckptguard-compare") as pool:
        return [_compare(manifest, here, there, open_now, deleted, depth, now, pool) for manifest in chosen]


def _compare(
    manifest: Manifest,
    here: Tree,
    there: Tree,
    uploads: Mapping[str, OpenUpload],
    deleted: Mapping[str, DeletedObject],
    depth: Evidence,
    now: float,
    pool: ThreadPoolExecutor,
) -> CheckpointCopy:
    files = []
    for file in manifest.files:
        entry, copy = file.entry, there.entries.get(file.entry.key)
        comparison = None
        if copy is not None and copy.size == entry.size and depth >= Evidence.STRUCTURE:
            comparison = compare_files(here.store, there.store, entry.key, entry.size, depth, pool)
        files.append(
            file_copy(
                file.name,
                entry,
                copy,
                upload=uploads.get(entry.key),
                deleted=deleted.get(entry.key),
                comparison=comparison,
                now=now,
            )
        )
    return CheckpointCopy(manifest.path, manifest.step, manifest.modified, tuple(files))


def compare_files(
    one: Store, other: Store, key: str, size: int, depth: Evidence, pool: ThreadPoolExecutor
) -> Comparison | None:
    """Compare a file of two stores as cheaply as it can be proven; None where that would need a deeper look."""
    try:
        if isinstance(one, Proving) and isinstance(other, Proving):
            shared = shared_checksum(one.proof(key), other.proof(key))
            if shared is not None:
                return shared
        if depth < Evidence.CONTENT:
            return None
        for near, far in ((one, other), (other, one)):
            if near.traits.local and isinstance(far, Proving):
                found = compare(near, key, far.proof(key), pool)
                if found.answer is not Answer.UNKNOWN:
                    return found
        return _stream(one, other, key, size, pool)
    except StoreError as error:
        return Comparison(Answer.UNKNOWN, f"could not be compared: {error.message}")


def _stream(one: Store, other: Store, key: str, size: int, pool: ThreadPoolExecutor) -> Comparison:
    """Read both sides; a difference is looked at again, past every cache, before it is one."""
    for start, length in differing_blocks(one, key, other, key, size, pool):
        fresh, fresh_other = one.fresh(key) or one, other.fresh(key) or other
        if fresh.read(key, start, length) != fresh_other.read(key, start, length):
            return Comparison(
                Answer.DIFFERENT, f"bytes {start}-{start + length - 1}", "other bytes", "these bytes"
            )
        return Comparison(Answer.UNKNOWN, f"two readings of bytes {start}-{start + length - 1} differ")
    return Comparison(Answer.SAME, "reading both")


def store_findings(
    store: Store,
    newest_safe: str | None,
    *,
    safe: int,
    now: float,
    orphaned: float = ORPHANED,
) -> tuple[Finding, ...]:
    """Findings on the store that a run lies in: uploads, rules that delete, files hidden by delete markers.

    `newest_safe` is the key of the newest safe checkpoint, `safe` how many there are. Empty for stores without any of
    that. What the store refuses to tell is named as such.
    """
    if not isinstance(store, Keeping):
        return ()
    found: list[Finding] = []
    found += _asked(
        "multipart uploads",
        store.url,
        lambda: upload_findings(list(store.uploads()), now, orphaned, running=True),
    )
    if newest_safe is None:
        return tuple(found)

    def rules() -> Iterator[Finding]:
        assert isinstance(store, Keeping)
        kept = store.retention()
        full = {store.full_key(e.key): e for e in store.list(newest_safe)} or {
            store.full_key(newest_safe): store.stat(newest_safe)
        }
        yield from retention_findings(kept, newest_safe, full, store.url, now, only=safe == 1)
        if kept.versioned:
            yield from _hidden(newest_safe, list(store.deleted(newest_safe)), now)

    found += _asked("lifecycle rules", store.url, rules)
    return tuple(found)


def _hidden(path: str, deleted: list[DeletedObject], now: float) -> Iterator[Finding]:
    if deleted:
        yield finding(
            "retention-risk",
            path,
            f"{len(deleted)} of its files are hidden by delete markers ({deleted[0].key}); their versions are still there",
            "remove the delete markers (aws s3api delete-object --version-id MARKER) before a rule removes the versions",
        )


def _asked(what: str, where: str, ask: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings, or that the question was not answered: a store that is silent is no store without risk."""
    try:
        return list(ask())
    except KeyNotFound:
        return []
    except StoreError as error:
        message = f"{what} of {where} could not be looked at: {error.message}"
        return [finding("retention-risk", where, message, error.hint, severity=Severity.INFO)]


def _descend(root: Directory, path: str) -> Directory | None:
    here: Directory | None = root
    for part in path.split("/") if path else ():
        here = here.dirs.get(part) if here else None
    return here

"""Adds to an audit's reports what the stores themselves have to say: the copy's state, uploads, rules that delete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptguard.checking import silence
from ckptguard.inspect import Options
from ckptguard.model import Finding, RunReport
from ckptguard.places import join
from ckptguard.replica_look import compare_with_replica, list_tree, store_findings
from ckptguard.replicas import CheckpointCopy
from ckptguard.storage.opening import open_store, split_target

Told = Callable[[str, Sequence[CheckpointCopy]], None]


def nobody(_where: str, _copies: Sequence[CheckpointCopy]) -> None:
    """For whoever wants the findings only."""


def with_stores(
    target: str,
    reports: Sequence[RunReport],
    options: Options,
    replica: str | None = None,
    told: Told = nobody,
) -> tuple[RunReport, ...]:
    """The reports with the findings on their store (orphaned uploads, rules), and, where one is named, on their replica.

    `told` gets where each copy lies and how far it is.

    For a target with several runs the replica has the same folders. Raises TargetNotFound, StoreError: a replica that
    cannot be looked at is no good replica.
    """
    return tuple(
        replace(
            r,
            findings=(
                *r.findings,
                *(silence(f, options.silenced) for f in _findings(target, r, options, replica, told)),
            ),
        )
        for r in reports
    )


def _findings(
    target: str, report: RunReport, options: Options, replica: str | None, told: Told
) -> tuple[Finding, ...]:
    now = options.now()
    store = open_store(report.root, max_rate=options.max_rate)
    safe = sum(v.resume.safe for v in report.checkpoints)
    newest = _key(report, report.newest_safe) if report.newest_safe else None
    found = store_findings(store, newest, safe=safe, now=now)
    if replica is None:
        return found
    copy = open_store(_counterpart(target, report, replica), max_rate=options.max_rate)
    found += compare_with_replica(
        store,
        copy,
        depth=options.depth,
        now=now,
        grace=options.grace,
        only=[_key(report, v.path) for v in report.checkpoints],
        jobs=options.jobs or 4,
        told=lambda copies: told(copy.url, copies),
    )
    # What the comparison said of an upload is not said twice.
    more = store_findings(copy, newest, safe=2, now=now)
    known = {(f.code, f.subject) for f in found}
    uploading = {s for code, s in known if code == "upload-incomplete"}
    return found + tuple(
        f
        for f in more
        if (f.code, f.subject) not in known
        and not any(f.subject.startswith(f"{path}/") for path in uploading)
    )


def _key(report: RunReport, path: str) -> str:
    return path.removeprefix(join(report.root, "").rstrip("/") + "/")


def _counterpart(target: str, report: RunReport, replica: str) -> str:
    """Where the report's run lies in the replica: the same folder below it; or, for a checkpoint, the run it lies in."""
    root, key = split_target(replica)
    below = report.root.removeprefix(target.rstrip("/")).strip("/") if report.root != target else ""
    if below and report.root.startswith(target):
        return join(root, below)
    if key:
        return root
    if [m.path for m in list_tree(open_store(root)).checkpoints] == [""]:
        return root.rstrip("/").rpartition("/")[0]
    return root

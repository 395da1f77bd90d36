"""Verdicts that an earlier audit recorded, as `RUN/.ckptguard/verdicts/x.json` for a checkpoint `RUN/x`.

A job need not wait for two terabytes to be read when that was done an hour ago and no file has changed since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptguard.codes import CODES
from ckptguard.errors import KeyNotFound, StoreError
from ckptguard.model import (
    Coverage,
    Effect,
    Evidence,
    Finding,
    Health,
    Manifest,
    NotRun,
    Resume,
    Severity,
    Verdict,
)
from ckptguard.ports import Store, WritableStore
from ckptguard.report.document import verdict_document

SCHEMA = 1
FOLDER = ".ckptguard/verdicts"
_ORDER = (Resume.EXACT, Resume.LOSSY, Resume.UNKNOWN, Resume.UNSAFE)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A verdict, and when it was made (epoch seconds)."""

    made: float
    verdict: Verdict

    def fits(self, manifest: Manifest, depth: Evidence, now: float, max_age: float) -> bool:
        """Whether it may stand for a look of this depth: young enough, deep enough, and of the very files that are there."""
        files = tuple((f.name, *f.entry.identity) for f in manifest.files)
        young = 0 <= now - self.made <= max_age
        return young and self.verdict.evidence >= depth and sorted(files) == sorted(self.verdict.seen)


def place(root: str, key: str) -> str:
    """The key of the record of a checkpoint, both relative to the store."""
    name = key[len(root) + 1 :] if root else key
    return f"{root}/{FOLDER}/{name}.json" if root else f"{FOLDER}/{name}.json"


def read(store: Store, root: str, key: str) -> Recorded | None:
    """What was recorded of a checkpoint; None where nothing was, or it cannot be understood: then there must be a look."""
    try:
        body = json.loads(store.read(place(root, key)))
        return Recorded(float(body["made"]), _verdict(body)) if body["schema"] == SCHEMA else None
    except (KeyNotFound, ValueError, KeyError, TypeError):
        return None


def write(store: WritableStore, root: str, key: str, verdict: Verdict, made: float) -> None:
    """Record a verdict. Raises StoreError. One on a save that is still going on, or that read nothing, is worth nothing."""
    if verdict.resume is Resume.WRITING or verdict.evidence is Evidence.LISTING:
        return
    body = {
        "schema": SCHEMA,
        "made": made,
        "verdict": verdict_document(verdict),
        "attempt": verdict.attempt,
        "modified": verdict.modified,
        "seen": [list(file) for file in verdict.seen],
        "silenced": {str(i): f.silenced for i, f in enumerate(verdict.findings) if f.silenced},
    }
    store.put(place(root, key), json.dumps(body, indent=1).encode() + b"\n")


def record(target: str, verdicts: Sequence[Verdict], root: str, made: float) -> None:
    """Keep what an audit said, below the run's root as the report prints it. Raises StoreError where it cannot be written."""
    from ckptguard.storage.opening import open_store

    store = open_store(root)
    if not isinstance(store, WritableStore):
        raise StoreError(f"{target}: verdicts cannot be kept in this kind of store")
    prefix = "" if root == "." else root.rstrip("/") + "/"
    for verdict in verdicts:
        if verdict.path.startswith(prefix) and verdict.path != root:
            write(store, "", verdict.path[len(prefix) :], verdict, made)


def combine(recorded: Verdict, fresh: Verdict) -> Verdict:
    """A recorded deep verdict with what a shallow look sees now: the worse of both, and the findings of both."""
    known = {(f.code, f.subject) for f in fresh.findings}
    findings = (*fresh.findings, *(f for f in recorded.findings if (f.code, f.subject) not in known))
    if fresh.resume is Resume.WRITING:
        return fresh
    worse = max(recorded.resume, fresh.resume, key=_ORDER.index)
    return replace(recorded, path=fresh.path, resume=worse, findings=findings, seen=fresh.seen)


def _verdict(body: Mapping[str, Any]) -> Verdict:
    document, silenced = body["verdict"], body["silenced"]
    coverage, health = document["coverage"], document["health"]
    return Verdict(
        path=document["path"],
        layout=document["layout"],
        step=document["step"],
        resume=Resume(document["resume"]),
        evidence=Evidence(document["evidence"]),
        files=document["files"],
        bytes=document["bytes"],
        components=document["components"],
        gaps=tuple(document["gaps"]),
        coverage=Coverage(
            coverage["checks"],
            tuple(NotRun(n["check"], n["why"]) for n in coverage["not_run"]),
            coverage["bytes_read"],
            coverage["bytes_proven"],
            coverage["unprovable"],
        ),
        health=Health(health["status"], health["since_step"], health["steps_to_discard"]),
        findings=tuple(_finding(f, silenced.get(str(i), "")) for i, f in enumerate(document["findings"])),
        attempt=body["attempt"],
        modified=body["modified"],
        seen=tuple((str(n), int(s), float(m), e) for n, s, m, e in body["seen"]),
    )


def _finding(f: Mapping[str, str], silenced: str) -> Finding:
    """A finding as it was before somebody silenced it: the silence may have ended since."""
    severity, message = Severity(f["severity"]), f["message"]
    if silenced:
        severity, message = CODES[f["code"]].severity, message.removesuffix(f" (silenced: {silenced})")
    return Finding(f["code"], severity, Effect(f["effect"]), f["subject"], message, f["hint"])

"""The audit that a reading process does for the service: the straight line of `ckptguard.inspect`, a checkpoint at a time.

Each verdict is told as soon as it stands, so that a new save need not wait for the backlog behind it. Bytes are hashed
in blocks while they are read: the catalog keeps the digests of the first sight, and they serve as a seal where a
checkpoint has none of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptguard.digest import BLOCK
from ckptguard.discover import Run, group_runs
from ckptguard.facts import Reader, Wanted
from ckptguard.jobs.lifecycle import fingerprint
from ckptguard.jobs.writers import any_written
from ckptguard.look import Look, find_pointers
from ckptguard.model import CheckpointFacts, Evidence, FileFacts, Manifest, Resume, Verdict
from ckptguard.report.document import report_document, verdict_document
from ckptguard.seals import Seal
from ckptguard.targets import Opened, Options, open_target

MOST_TENSORS = 20_000
NEWEST = 12
"""So many of the newest checkpoints are seen beside those that are asked for: what a run has in common shows in them."""
NEIGHBOURS = 2

Progress = Callable[[str, int], None]
Tell = Callable[[Mapping[str, Any]], None]


class _Hashing(Reader):
    """A reader that gives the digest of every block of what it reads whole."""

    def read(self, manifest: Manifest, wanted: Wanted) -> dict[str, FileFacts]:
        blocks = {f.name: BLOCK for f in manifest.files} | dict(wanted.blocks)
        return super().read(
            manifest, replace(wanted, blocks=blocks) if wanted.depth >= Evidence.CONTENT else wanted
        )


class _Remembering(Look):
    """A look that compares with what the catalog remembers, where the run has no seal, and is told which saves are over."""

    remembered: Mapping[str, Seal]
    over: frozenset[str]
    still: frozenset[str]
    _named: dict[str, float] | None = None

    def _seal(self, manifest: Manifest) -> Seal | None:
        return super()._seal(manifest) or self.remembered.get(manifest.path)

    def grace(self, manifest: Manifest) -> float:
        """None for a save that is over: what is broken in it will not be finished."""
        over = manifest.path in self.over or (manifest.path in self.still and self._pointed(manifest))
        return -math.inf if over and not self._written(manifest) else self.options.grace

    def _pointed(self, manifest: Manifest) -> bool:
        """Whether a pointer that is not older than the checkpoint's last change names it."""
        if self._named is None:
            self._named = {}
            for pointer in find_pointers(self.opened.store, self.run.root, self.manifests):
                if pointer.resolved is not None:
                    before = self._named.get(pointer.resolved, -math.inf)
                    self._named[pointer.resolved] = max(before, pointer.entry.modified)
        return self._named.get(manifest.path, -math.inf) >= manifest.modified

    def _written(self, manifest: Manifest) -> bool:
        local = self.opened.store.traits.local and "://" not in self.opened.prefix
        return local and any_written(Path(self.opened.shown(f.entry.key)) for f in manifest.files)


def audit(request: Mapping[str, Any], progress: Progress, tell: Tell) -> dict[str, Any]:
    """Judge the checkpoints `deep` of a run at `depth`, in that order, and the run as a whole.

    `remembered` holds seals by path; `known` verdicts by path, that hold for a fingerprint: a shallow look at the same
    bytes does not unsay them. `over` are saves that nobody goes on with, `still` those that have not changed of late. Paths are relative to the target; "" is the target itself.
    """
    options = Options(
        depth=Evidence(request["depth"]), grace=float(request["grace"]), max_rate=request.get("max_rate")
    )
    opened, directory, manifests = open_target(request["target"], options)
    seals = {path: Seal.model_validate(body) for path, body in (request.get("remembered") or {}).items()}
    reports = []
    with _Hashing(opened.store, options.jobs, progress) as reader:
        for run in group_runs(directory, manifests):
            if opened.only is not None and all(m.path != opened.only for m in run.checkpoints):
                continue
            one = _one_run(request, opened, run, options, reader, seals, tell)
            if one is not None:
                reports.append(one)
    return {"reports": reports}


def _one_run(
    request: Mapping[str, Any], opened: Opened, run: Run, options: Options, reader: Reader,
    seals: Mapping[str, Seal], tell: Tell,
) -> dict[str, Any] | None:  # fmt: skip
    look = _Remembering(opened, run, options, reader)
    path_of = _names(opened)
    look.remembered = {m.path: seals[path_of(m.path)] for m in look.manifests if path_of(m.path) in seals}
    look.over = frozenset(m.path for m in look.manifests if path_of(m.path) in request["over"])
    look.still = frozenset(m.path for m in look.manifests if path_of(m.path) in request["still"])
    deep = [m for path in request["deep"] for m in look.manifests if path_of(m.path) == path]
    beside = [m for m in neighbours(look.manifests, deep) if look.read(m, Evidence.STRUCTURE) is not None]
    for manifest in deep:
        if look.read(manifest, options.depth) is None:
            continue
        facts = look.facts[manifest.path]
        verdict = look.verdict(facts, list(look.facts.values()))
        tell({"path": path_of(manifest.path), "document": verdict_document(verdict), **_kept(facts)})
    pairs = []
    for manifest in beside:
        facts = look.facts[manifest.path]
        verdict = look.verdict(facts, list(look.facts.values()))
        if manifest not in deep:
            # Files that only their content told to be checkpoints become known by this.
            tell({"path": path_of(manifest.path), "document": verdict_document(verdict), **_kept(facts)})
        pairs.append((facts, _standing(verdict, facts, request["known"].get(path_of(manifest.path)))))
    if not pairs and not look.leftovers:
        return None
    report = report_document(look.report(request["target"], pairs))
    latest = next((path_of(f.path) for f, v in pairs if v.path == report["latest"]), None)
    return {"findings": report["findings"], "latest": latest}


def _names(opened: Opened) -> Callable[[str], str]:
    return lambda key: "" if key == opened.only else key


def neighbours(manifests: Sequence[Manifest], deep: Sequence[Manifest]) -> list[Manifest]:
    """Those that are asked for, the ones next to them by step, and the newest ones of the run."""
    ordered = sorted(manifests, key=lambda m: (m.step is not None, m.step or 0, m.modified))
    wanted = set(range(max(0, len(ordered) - NEWEST), len(ordered)))
    for place, manifest in enumerate(ordered):
        if manifest in deep:
            wanted |= set(range(max(0, place - NEIGHBOURS), min(len(ordered), place + NEIGHBOURS + 1)))
    return [ordered[place] for place in sorted(wanted)]


def _standing(verdict: Verdict, facts: CheckpointFacts, known: Mapping[str, Any] | None) -> Verdict:
    if (
        known is None
        or known["fingerprint"] != _fingerprint(facts)
        or Evidence(known["evidence"]) <= facts.evidence
    ):
        return verdict
    return replace(verdict, resume=Resume(known["resume"]), evidence=Evidence(known["evidence"]))


def _fingerprint(facts: CheckpointFacts) -> str:
    return fingerprint(f.entry for f in facts.manifest.files)


def _kept(facts: CheckpointFacts) -> dict[str, Any]:
    deep = facts.evidence >= Evidence.CONTENT
    return {
        "fingerprint": _fingerprint(facts),
        "files": list(_files(facts)) if deep else [],
        "tensors": list(_tensors(facts)) if deep else [],
    }


def _files(facts: CheckpointFacts) -> Iterator[dict[str, Any]]:
    for file in facts.manifest.files:
        known = facts.files.get(file.name)
        if known is not None and known.blocks:
            yield {
                "name": file.name,
                "size": file.entry.size,
                "modified": file.entry.modified,
                "etag": file.entry.etag,
                "block_size": known.block_size,
                "blocks": list(known.blocks),
            }


def _tensors(facts: CheckpointFacts) -> Iterator[dict[str, Any]]:
    count = 0
    for name, file in facts.files.items():
        for tensor in file.tensors:
            if tensor.facts is None or count >= MOST_TENSORS:
                continue
            count += 1
            yield {
                "file": name,
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "nbytes": tensor.nbytes,
                "digest": tensor.facts.digest,
                "nonfinite": tensor.facts.nan + tensor.facts.inf,
                "minimum": tensor.facts.minimum,
                "maximum": tensor.facts.maximum,
                "norm": tensor.facts.norm,
            }

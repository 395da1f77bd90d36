"""The audit that a reading process does: the straight line of `ckptguard.inspect`, and what the catalog keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptguard import inspect
from ckptguard.jobs.lifecycle import fingerprint
from ckptguard.model import CheckpointFacts, Evidence
from ckptguard.report.document import report_document
from ckptguard.seals import Seal

MOST_TENSORS = 20_000


def audit(request: Mapping[str, Any], say: Callable[[str, int], None]) -> dict[str, Any]:
    """The documents of one target, and for each checkpoint whose bytes were read their digests and statistics.

    `remembered` holds what the catalog knows of the files' digests, for checkpoints that have no seal.
    """
    seen: list[dict[str, Any]] = []
    options = inspect.Options(
        depth=Evidence(request["depth"]),
        grace=float(request["grace"]),
        max_rate=request.get("max_rate"),
        digests=True,
        remembered=_seals(request.get("remembered") or {}),
        on_facts=lambda facts: seen.append(_kept(facts)),
    )
    reports = inspect.audit(request["target"], options, say)
    return {"reports": [report_document(report) for report in reports], "facts": seen}


def _seals(remembered: Mapping[str, Any]) -> Callable[[str], Seal | None]:
    seals = {path: Seal.model_validate(body) for path, body in remembered.items()}
    return seals.get


def _kept(facts: CheckpointFacts) -> dict[str, Any]:
    deep = facts.evidence >= Evidence.CONTENT
    return {
        "path": facts.path,
        "fingerprint": fingerprint(f.entry for f in facts.manifest.files),
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

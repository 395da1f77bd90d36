"""The same samples on disk and on S3, case by case: the same verdicts, the same findings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptguard.errors import CkptguardError
from ckptguard.inspect import Options, audit

pytestmark = pytest.mark.s3

CORPUS = Path(os.environ.get("CKPTGUARD_CORPUS", Path(__file__).parents[3] / "shared/corpus"))
SAMPLE = 8
# What a disk has and an object store has not: links, and times of their own.
BY_TIME = frozenset({"stale-pointer", "debris", "unindexed-tensor"})


def cases() -> list[str]:
    if not CORPUS.is_dir():
        return []
    return sorted(
        p.parent.name
        for p in CORPUS.glob("*/label.json")
        if not any(f.is_symlink() for f in p.parent.rglob("*"))
    )


def said(target: str) -> Any:
    """Everything that is said of a target but its path."""
    try:
        reports = audit(target, Options(grace=0))
    except CkptguardError as error:
        return error.error_code
    return [
        {
            "checkpoints": [
                (
                    v.path.removeprefix(target),
                    v.resume,
                    v.layout,
                    v.step,
                    v.bytes,
                    sorted((f.code, f.effect, f.subject) for f in v.findings),
                )
                for v in report.checkpoints
            ],
            "findings": sorted(f.code for f in report.findings if f.code not in BY_TIME),
            # Of two copies of one step the newer is taken, and an upload gives both the same second.
            "resume_from": [v.step for v in report.checkpoints if v.path == report.resume_from],
        }
        for report in reports
    ]


@pytest.mark.parametrize(
    "names",
    [pytest.param(cases()[::SAMPLE], id="sample"), pytest.param(cases(), id="all", marks=pytest.mark.soak)],
)
def test_the_same_is_said(names: list[str], s3_bucket: str, s3_server: Any) -> None:
    if not names:
        pytest.skip("the corpus does not lie beside the checkout, and CKPTGUARD_CORPUS does not name it")
    client, bucket = s3_server.client(), s3_bucket.removeprefix("s3://")

    def upload(path: Path) -> None:
        client.put_object(Bucket=bucket, Key=path.relative_to(CORPUS).as_posix(), Body=path.read_bytes())

    differing: dict[str, Any] = {}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(upload, (p for name in names for p in _files(CORPUS / name))))
    for name in names:
        target = json.loads((CORPUS / name / "label.json").read_text())["target"]
        below = name if target == "." else f"{name}/{target}"
        here, there = said(f"{CORPUS}/{below}"), said(f"{s3_bucket}/{below}")
        if here != there:
            differing[name] = (here, there)
    assert not differing, json.dumps(differing, indent=1, default=str)[:4000]


def _files(folder: Path) -> Iterator[Path]:
    yield from (p for p in sorted(folder.rglob("*")) if p.is_file())

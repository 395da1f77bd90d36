"""A distant checkpoint as files of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptguard.errors import NothingRecognised, Refused
from ckptguard.replica_look import list_tree
from ckptguard.replicate import replicate
from ckptguard.staging import stage, staged
from ckptguard.storage import open_store

pytestmark = pytest.mark.s3


def test_staged_whole_kept_and_removed(make_run: Callable[[], Path], s3_bucket: str, tmp_path: Path) -> None:
    run, url = make_run(), f"{s3_bucket}/runs/a"
    tree = list_tree(open_store(str(run)))
    for manifest in tree.checkpoints:
        replicate(tree.store, manifest, open_store(url), now=time.time())  # type: ignore[arg-type]
    with staged(f"{url}/checkpoint-20", tmp_path) as path:
        assert path.name == "checkpoint-20"
        assert (path / "optimizer.pt").read_bytes() == (run / "checkpoint-20/optimizer.pt").read_bytes()
    assert not path.exists()

    kept = stage(f"{url}/checkpoint-30", tmp_path / "stage")
    before = (kept / "optimizer.pt").stat().st_mtime_ns
    assert stage(f"{url}/checkpoint-30/", tmp_path / "stage") == kept
    assert (kept / "optimizer.pt").stat().st_mtime_ns == before
    (kept / "optimizer.pt").write_bytes(b"spoilt")
    with pytest.raises(Refused):
        stage(f"{url}/checkpoint-30", tmp_path / "stage")
    with pytest.raises(NothingRecognised):
        stage(f"{url}", tmp_path / "stage")
    assert stage(str(run), tmp_path) == run

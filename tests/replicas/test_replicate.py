"""Checkpoints are copied, proven, noted; pointers move last; nothing that others wrote is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptguard.arriving import alone
from ckptguard.errors import Refused, StoreError
from ckptguard.model import Evidence, Manifest
from ckptguard.onto_disk import INCOMING
from ckptguard.replica_look import Tree, compare_with_replica, list_tree
from ckptguard.replicate import RECEIPTS, Replica, replicate
from ckptguard.seals import Seal, read_seal, seal_file, write_seal
from ckptguard.storage import open_store
from ckptguard.storage.local import LocalStore
from ckptguard.testing import FaultyStore

pytestmark = pytest.mark.s3

MakeRun = Callable[[], Path]


def tree_of(url: str | Path) -> Tree:
    return list_tree(open_store(str(url)))


def checkpoint(tree: Tree, step: int) -> Manifest:
    return next(m for m in tree.checkpoints if m.path == f"checkpoint-{step}")


def copy(source: Tree, step: int, to: Any, **options: Any) -> Replica:
    destination = open_store(to) if isinstance(to, str) else to
    manifest = checkpoint(source, step)
    return replicate(
        source.store, manifest, destination, pointers=source.pointers(), now=time.time(), **options
    )


def files_of(url: str) -> dict[str, bytes]:
    store = open_store(url)
    return {
        e.key: store.read(e.key)
        for e in store.list()
        if e.kind == "file" and not e.key.startswith(".ckptguard")
    }


def test_to_s3_and_back_with_seal_and_pointer(make_run: MakeRun, s3_bucket: str, tmp_path: Path) -> None:
    run = make_run()
    (run / "latest").write_text("checkpoint-30")
    source = tree_of(run)
    manifest = checkpoint(source, 30)
    sealed = {f.name: seal_file(source.store, f.entry) for f in manifest.files}
    write_seal(source.store, "", Seal(checkpoint="checkpoint-30", files=sealed))

    url = f"{s3_bucket}/runs/a"
    done = copy(source, 30, url)
    assert done.pointers == ("latest",)
    assert done.sent == done.size == manifest.size
    there = tree_of(url)
    assert [m.path for m in there.checkpoints] == ["checkpoint-30"]
    seal = read_seal(there.store, "", "checkpoint-30")
    assert seal is not None and all(seal.files[f.name].fits(f.entry) for f in checkpoint(there, 30).files)
    receipt = json.loads(there.store.read(f"{RECEIPTS}/checkpoint-30.json"))
    assert set(receipt["files"]) == {f.name for f in manifest.files}

    again = copy(source, 30, url)
    assert (again.sent, again.pointers) == (0, ())

    back = tmp_path / "back"
    back.mkdir()
    copy(there, 30, str(back))
    assert files_of(str(back)) == {
        k: v for k, v in files_of(str(run)).items() if k.startswith(("checkpoint-30", "latest"))
    }
    found = compare_with_replica(
        open_store(str(back)), there.store, depth=Evidence.CONTENT, now=time.time() + 9999, grace=0
    )
    assert [f for f in found if f.severity > "info"] == []


def test_a_pointer_never_goes_backwards(make_run: MakeRun, s3_bucket: str) -> None:
    run = make_run()
    for step in (20, 10, 30):
        (run / "latest").write_text(f"checkpoint-{step}")
        copy(tree_of(run), step, s3_bucket)
        said = files_of(s3_bucket)["latest"]
        assert said == (b"checkpoint-20" if step == 10 else f"checkpoint-{step}".encode())


def test_other_bytes_are_left_as_they_are(
    make_run: MakeRun, s3_bucket: str, s3_server: Any, tmp_path: Path
) -> None:
    source = tree_of(make_run())
    bucket = s3_bucket.removeprefix("s3://")
    s3_server.client().put_object(Bucket=bucket, Key="checkpoint-10/optimizer.pt", Body=b"precious")
    with pytest.raises(Refused, match="other bytes lie there already"):
        copy(source, 10, s3_bucket)
    assert files_of(s3_bucket)["checkpoint-10/optimizer.pt"] == b"precious"
    assert not list(open_store(s3_bucket).list(RECEIPTS))
    copy(source, 10, s3_bucket, overwrite=True)
    assert len(files_of(s3_bucket)["checkpoint-10/optimizer.pt"]) > 100

    other = tmp_path / "other"
    (other / "checkpoint-10").mkdir(parents=True)
    (other / "checkpoint-10/optimizer.pt").write_bytes(b"precious")
    with pytest.raises(Refused, match="missing or different"):
        copy(source, 10, str(other))
    assert [p.name for p in other.rglob("*") if p.is_file()] == ["optimizer.pt"]
    copy(source, 10, str(other), overwrite=True)
    assert len(files_of(str(other))) == len(checkpoint(source, 10).files)
    assert (other / ".ckptguard/replaced/checkpoint-10/optimizer.pt").read_bytes() == b"precious"


def test_what_an_earlier_save_left_half_way_is_not_mixed_in(make_run: MakeRun, tmp_path: Path) -> None:
    run, other = make_run(), tmp_path / "other"
    staged = other / INCOMING / "checkpoint-10"
    staged.mkdir(parents=True)
    (staged / "gone.bin").write_bytes(b"of an earlier save")
    (staged / "optimizer.pt").write_bytes(b"of an earlier save")
    copy(tree_of(run), 10, str(other))
    assert files_of(str(other)) == {
        k: v for k, v in files_of(str(run)).items() if k.startswith("checkpoint-10/")
    }


def test_one_copy_onto_a_disk_at_a_time(make_run: MakeRun, tmp_path: Path) -> None:
    source, other = tree_of(make_run()), tmp_path / "other"
    other.mkdir()
    lock = other / INCOMING / "checkpoint-10.lock"
    with alone(lock, "it"), pytest.raises(Refused, match="another process is at work"):
        copy(source, 10, str(other))
    copy(source, 10, str(other))


def test_a_failure_leaves_nothing_that_looks_complete(
    make_run: MakeRun, s3_bucket: str, tmp_path: Path
) -> None:
    source = tree_of(make_run())
    broken = FaultyStore(source.store, deny={"checkpoint-20/optimizer.pt": StoreError("made to fail")})
    source_broken = Tree(broken, source.entries, source.root, source.runs)
    other = tmp_path / "other"
    other.mkdir()
    for to in (s3_bucket, str(other)):
        with pytest.raises(StoreError, match="made to fail"):
            copy(source_broken, 20, to)
        left = open_store(to)
        # The file without which nobody takes it for a checkpoint to resume from comes last.
        assert "checkpoint-20/trainer_state.json" not in {e.key for e in left.list()}
        assert not list(left.list(RECEIPTS))
        copy(source, 20, to)
        assert checkpoint(tree_of(to), 20).files


def test_two_replicators_at_once(make_run: MakeRun, s3_bucket: str) -> None:
    run = make_run()
    (run / "latest").write_text("checkpoint-30")
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda step: copy(tree_of(run), step, s3_bucket), (30, 30, 20, 30)))
    assert len(done) == 4
    assert {k: v for k, v in files_of(s3_bucket).items() if "/" in k} == {
        k: v for k, v in files_of(str(run)).items() if k.startswith(("checkpoint-30", "checkpoint-20"))
    }
    assert files_of(s3_bucket)["latest"] == b"checkpoint-30"


def test_too_little_space_is_found_out_before_anything_is_written(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tree_of(make_run())
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr("ckptguard.arriving.shutil.disk_usage", lambda path: type("U", (), {"free": 1000})())
    with pytest.raises(Refused, match=r"are needed and 1 kB are free"):
        copy(source, 10, LocalStore(other))
    assert list(other.iterdir()) == []

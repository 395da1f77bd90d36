"""A run on disk against its copy on a real S3 server, with every way in which a copy goes wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptguard.model import Evidence, Finding, Severity
from ckptguard.replica_look import compare_with_replica, store_findings
from ckptguard.storage import open_store

pytestmark = pytest.mark.s3


class Copy:
    """A run, its copy in a bucket, and ways to spoil the copy."""

    def __init__(self, run: Path, url: str, client: Any) -> None:
        self.run, self.url, self.client = run, url, client
        self.bucket = url.removeprefix("s3://").partition("/")[0]
        (run / "latest").write_text("checkpoint-30")
        os.utime(run / "latest", (time.time() - 3600,) * 2)
        for path in sorted(p for p in run.rglob("*") if p.is_file()):
            self.put(path.relative_to(run).as_posix(), path.read_bytes())

    def put(self, key: str, data: bytes, **extra: Any) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"run/{key}", Body=data, **extra)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"run/{key}")

    def look(self, depth: Evidence = Evidence.CONTENT, later: float = 7200, **options: Any) -> list[Finding]:
        found = compare_with_replica(
            open_store(str(self.run)),
            open_store(self.url),
            depth=depth,
            now=time.time() + later,
            grace=900,
            **options,
        )
        return list(found)

    def loud(self, **options: Any) -> list[tuple[str, str]]:
        return [(f.code, f.subject) for f in self.look(**options) if f.severity > Severity.INFO]


@pytest.fixture
def copy(make_run: Callable[[], Path], s3_bucket: str, s3_server: Any) -> Copy:
    return Copy(make_run(), f"{s3_bucket}/run", s3_server.client())


def test_a_good_copy_is_proven_and_gives_no_finding(copy: Copy) -> None:
    assert copy.look() == []
    listed = copy.look(depth=Evidence.LISTING)
    assert {(f.code, f.severity) for f in listed} == {("unverifiable", Severity.INFO)}


def test_the_other_way_round(copy: Copy) -> None:
    found = compare_with_replica(
        open_store(copy.url), open_store(str(copy.run)), depth=Evidence.CONTENT, now=time.time(), grace=0
    )
    assert [f.code for f in found] == []


def test_each_fault_is_named_with_its_checkpoint(copy: Copy) -> None:
    data = (copy.run / "checkpoint-10/optimizer.pt").read_bytes()
    copy.put("checkpoint-10/optimizer.pt", data[:-1] + bytes([data[-1] ^ 1]))
    copy.put("checkpoint-20/model.safetensors", data[:100])
    copy.delete("checkpoint-30/trainer_state.json")
    found = copy.loud()
    assert ("replica-mismatch", "checkpoint-10") in found
    assert ("upload-incomplete", "checkpoint-20") in found
    assert ("upload-incomplete", "checkpoint-30") in found
    assert ("early-pointer", f"{copy.url}/latest") in found
    assert len(found) == 4


def test_an_open_upload_is_told_from_an_orphan(copy: Copy) -> None:
    copy.delete("checkpoint-30/optimizer.pt")
    begun = copy.client.create_multipart_upload(Bucket=copy.bucket, Key="run/checkpoint-30/optimizer.pt")
    copy.client.upload_part(
        Bucket=copy.bucket,
        Key="run/checkpoint-30/optimizer.pt",
        UploadId=begun["UploadId"],
        PartNumber=1,
        Body=b"x" * 500,
    )
    (message,) = (f.message for f in copy.look() if f.code == "upload-incomplete")
    assert "optimizer.pt (upload open for" in message and "1 parts, 500 B" in message
    assert "orphaned-multipart" not in {f.code for f in copy.look()}
    assert "orphaned-multipart" in {f.code for f in copy.look(later=3 * 86400)}


def test_a_late_copy_and_a_deleted_one(copy: Copy) -> None:
    copy.client.put_bucket_versioning(Bucket=copy.bucket, VersioningConfiguration={"Status": "Enabled"})
    copy.delete("checkpoint-20/optimizer.pt")
    for path in (copy.run / "checkpoint-30").iterdir():
        os.utime(path, (time.time() - 60,) * 2)
        copy.client.delete_object(Bucket=copy.bucket, Key=f"run/checkpoint-30/{path.name}", VersionId="null")
    copy.delete("latest")
    (deleted,) = (f for f in copy.look() if f.code == "replica-mismatch")
    assert deleted.subject == "checkpoint-20" and "still there" in deleted.message
    assert ("upload-lag", "checkpoint-30") in copy.loud()
    assert [f.code for f in copy.look(later=0) if f.subject == "checkpoint-30"] == []


def test_what_the_bucket_itself_will_do(copy: Copy) -> None:
    store = open_store(copy.url)
    assert store_findings(store, "checkpoint-30", safe=3, now=time.time()) == ()
    begun = copy.client.create_multipart_upload(Bucket=copy.bucket, Key="run/checkpoint-40/model.safetensors")
    (running,) = store_findings(store, "checkpoint-30", safe=3, now=time.time())
    assert (running.code, running.severity) == ("upload-incomplete", Severity.INFO)
    copy.client.abort_multipart_upload(
        Bucket=copy.bucket, Key="run/checkpoint-40/model.safetensors", UploadId=begun["UploadId"]
    )
    rule = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": "run/"}, "Expiration": {"Days": 1}}
    copy.client.put_bucket_lifecycle_configuration(
        Bucket=copy.bucket, LifecycleConfiguration={"Rules": [rule]}
    )
    (risk,) = store_findings(store, "checkpoint-30", safe=1, now=time.time())
    assert (risk.code, risk.severity) == ("retention-risk", Severity.ERROR)
    assert "the only safe checkpoint" in risk.message

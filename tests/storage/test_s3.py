"""The S3 store, against a real server: the contract of all stores, and what only S3 has."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ckptguard.errors import (
    KeyNotFound,
    MissingExtra,
    Refused,
    StoreDenied,
    StoreError,
    TargetNotFound,
    UsageError,
)
from ckptguard.ports import Store
from ckptguard.storage import open_store
from ckptguard.storage._s3_client import S3Options, parse_url
from ckptguard.storage._s3_errors import ObjectChanged, scrub
from ckptguard.storage.opening import split_target
from ckptguard.storage.s3 import S3Store
from ckptguard.testing import MakeStore, WritableStoreContract
from ckptguard.testing_s3 import LISTER, READER, SeaweedServer

pytestmark = pytest.mark.s3

Fill = Callable[[Mapping[str, bytes]], str]


class TestS3Store(WritableStoreContract):
    @pytest.fixture
    def make_store(self, s3_fill: Fill) -> MakeStore:
        def make(files: Mapping[str, bytes]) -> Store:
            return S3Store(s3_fill({f"below/{key}": data for key, data in files.items()}) + "/below")

        return make


class TestOpenedStore(TestS3Store):
    """The same through what `open_store` wraps around it."""

    @pytest.fixture
    def make_store(self, s3_fill: Fill) -> MakeStore:
        return lambda files: open_store(s3_fill(files))


def test_lists_more_than_one_page(s3_client: Any, s3_fill: Fill) -> None:
    url = s3_fill({f"run/{n:04}": b"x" for n in range(25)})
    store = S3Store(url, S3Options(page=10))
    assert [e.key for e in store.list("run")] == [f"run/{n:04}" for n in range(25)]
    assert store.requests == 3


def test_folder_markers_are_no_files(s3_fill: Fill) -> None:
    assert [e.key for e in S3Store(s3_fill({"run/": b"", "run/a": b"1"})).list()] == ["run/a"]


def test_targets_are_prefixes_or_objects(s3_fill: Fill) -> None:
    url = s3_fill({"runs/a/ckpt_10.pt": b"1", "runs/a/sub/x": b"2"})
    assert split_target(f"{url}/runs/a") == (f"{url}/runs/a", "")
    assert split_target(f"{url}/runs/a/ckpt_10.pt") == (f"{url}/runs/a", "ckpt_10.pt")
    with pytest.raises(TargetNotFound, match="nothing is stored there"):
        split_target(f"{url}/runs/b")
    with pytest.raises(TargetNotFound, match="there is no bucket no-such-bucket"):
        split_target("s3://no-such-bucket/runs")


def test_an_object_replaced_while_it_is_read_is_noticed(s3_client: Any, s3_fill: Fill) -> None:
    url = s3_fill({"a": b"1" * 100})
    store = S3Store(url)
    store.stat("a")
    s3_client.put_object(Bucket=url.removeprefix("s3://"), Key="a", Body=b"2" * 100)
    with pytest.raises(ObjectChanged, match="replaced while it was read"):
        store.read("a", 10, 20)
    store.stat("a")
    assert store.read("a", 10, 20) == b"2" * 20


def test_conditions_of_a_put_protect_what_others_wrote(s3_fill: Fill) -> None:
    store = S3Store(s3_fill({"pointer": b"checkpoint-10"}))
    seen = store.stat("pointer")
    store.put("pointer", b"checkpoint-20", if_match=seen.etag)
    with pytest.raises(Refused, match="changed by someone else"):
        store.put("pointer", b"checkpoint-15", if_match=seen.etag)
    assert store.read("pointer") == b"checkpoint-20"


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_the_stores_checksums_are_known(s3_client: Any, s3_bucket: str, algorithm: str) -> None:
    s3_client.put_object(
        Bucket=s3_bucket.removeprefix("s3://"), Key="a", Body=b"hello", ChecksumAlgorithm=algorithm
    )
    proof = S3Store(s3_bucket).proof("a")
    assert [(c.algorithm, c.composite) for c in proof.checksums] == [(algorithm.lower(), False)]
    assert proof.entry.etag == "5d41402abc4b2a76b9719d911017c592"
    assert base64.b64decode(proof.checksums[0].value)


def test_parts_of_an_upload_are_known(s3_client: Any, s3_bucket: str) -> None:
    upload(s3_client, s3_bucket, "a", [b"x" * (5 << 20), b"y" * 1000], "CRC32C")
    proof = S3Store(s3_bucket).proof("a")
    assert proof.part_sizes == (5 << 20, 1000)
    assert [(c.algorithm, c.composite) for c in proof.checksums] == [("crc32c", True)]


def test_open_uploads_and_hidden_keys_and_rules_are_seen(s3_client: Any, s3_bucket: str) -> None:
    bucket = s3_bucket.removeprefix("s3://")
    begun = s3_client.create_multipart_upload(Bucket=bucket, Key="run/c/model.pt")
    s3_client.upload_part(
        Bucket=bucket, Key="run/c/model.pt", UploadId=begun["UploadId"], PartNumber=1, Body=b"1" * 99
    )
    store = S3Store(f"{s3_bucket}/run")
    (found,) = store.uploads()
    assert (found.key, found.parts, found.bytes) == ("c/model.pt", 1, 99)
    assert list(store.uploads("other")) == []

    s3_client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    version = s3_client.put_object(Bucket=bucket, Key="run/a", Body=b"1")["VersionId"]
    s3_client.delete_object(Bucket=bucket, Key="run/a")
    (hidden,) = store.deleted()
    assert (hidden.key, hidden.version_id) == ("a", version)

    expiring = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": "run/"}, "Expiration": {"Days": 3}}
    elsewhere = {"ID": "other", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 1}}
    s3_client.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": [expiring, elsewhere]}
    )
    kept = store.retention()
    assert [(r.name, r.days) for r in kept.rules] == [("tidy", 3)]
    assert kept.versioned and not kept.unknown

    store.abort_upload(found)
    assert list(store.uploads()) == []


class TestErrors:
    """Each says what to do, and none shows a secret."""

    def store(
        self, server: SeaweedServer, monkeypatch: pytest.MonkeyPatch, url: str, **environment: str
    ) -> S3Store:
        for name, value in {**server.environment(), **environment}.items():
            monkeypatch.setenv(name, value)
        return S3Store(url, S3Options(connect_timeout=1, read_timeout=2, attempts=1))

    def test_no_credentials(
        self, s3_server: SeaweedServer, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = self.store(s3_server, monkeypatch, s3_bucket)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        store = S3Store(s3_bucket)
        with pytest.raises(StoreDenied, match="no credentials") as caught:
            list(store.list())
        assert "AWS_ACCESS_KEY_ID" in caught.value.hint

    @pytest.mark.parametrize(
        "environment", [{"AWS_ACCESS_KEY_ID": "AKIAUNKNOWNKEY00"}, {"AWS_SECRET_ACCESS_KEY": "wrong-secret"}]
    )
    def test_refused_credentials_are_not_shown(
        self,
        s3_server: SeaweedServer,
        s3_bucket: str,
        monkeypatch: pytest.MonkeyPatch,
        environment: dict[str, str],
    ) -> None:
        store = self.store(s3_server, monkeypatch, s3_bucket, **environment)
        with pytest.raises(StoreDenied, match="does not accept the credentials") as caught:
            list(store.list())
        text = f"{caught.value.message} {caught.value.hint}"
        assert not any(value in text for value in ("AKIAUNKNOWN", "wrong-secret", "owner-secret"))

    def test_forbidden_names_the_permission(
        self, s3_server: SeaweedServer, s3_fill: Fill, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = s3_fill({"a": b"1"})
        lister = {"AWS_ACCESS_KEY_ID": LISTER.access_key, "AWS_SECRET_ACCESS_KEY": LISTER.secret_key}
        store = self.store(s3_server, monkeypatch, url, **lister)
        assert [e.key for e in store.list()] == ["a"]
        with pytest.raises(StoreDenied, match="s3:GetObject is not allowed"):
            store.read("a", 0, 1)
        reader = {"AWS_ACCESS_KEY_ID": READER.access_key, "AWS_SECRET_ACCESS_KEY": READER.secret_key}
        store = self.store(s3_server, monkeypatch, url, **reader)
        assert store.read("a") == b"1"
        with pytest.raises(StoreDenied, match="s3:PutObject is not allowed"):
            store.put("b", b"2")

    def test_anonymous(
        self, s3_server: SeaweedServer, s3_fill: Fill, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = s3_fill({"a": b"1"}).replace("s3://", "s3://anonymous@")
        with pytest.raises(StoreDenied, match="s3:ListBucket is not allowed"):
            list(self.store(s3_server, monkeypatch, url).list())

    def test_unknown_profile(self, s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(StoreDenied, match="no such profile"):
            self.store(s3_server, monkeypatch, "s3://nobody@bucket/run")

    def test_no_bucket(self, s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(KeyNotFound, match="there is no bucket missing-bucket"):
            list(self.store(s3_server, monkeypatch, "s3://missing-bucket/run").list())

    def test_unreachable(self, s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(StoreError, match="cannot be reached") as caught:
            list(
                self.store(
                    s3_server, monkeypatch, "s3://b/run", AWS_ENDPOINT_URL_S3="http://127.0.0.1:9"
                ).list()
            )
        assert "AWS_ENDPOINT_URL_S3" in caught.value.hint

    @pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s3://bucket?x=1"])
    def test_urls_that_name_nothing(self, url: str) -> None:
        with pytest.raises(UsageError):
            parse_url(url)

    def test_without_boto3_the_extra_is_named(self) -> None:
        code = "import sys; sys.modules['boto3'] = None\nfrom ckptguard.storage.s3 import S3Store\nS3Store('s3://b')"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}
        )
        assert MissingExtra.__name__ in done.stderr and "needs the package boto3" in done.stderr

    def test_secrets_are_taken_out_of_whatever_text(self) -> None:
        text = "GET http://u:hunter2@h/b?X-Amz-Credential=AKIAABCDEFGHIJKL/x&X-Amz-Signature=feed0 failed"
        assert "hunter2" not in scrub(text) and "AKIA" not in scrub(text) and "feed0" not in scrub(text)


def upload(client: Any, url: str, key: str, parts: list[bytes], algorithm: str | None) -> None:
    """A multipart upload as other tools make it."""
    bucket = url.removeprefix("s3://")
    extra = {"ChecksumAlgorithm": algorithm} if algorithm else {}
    begun = client.create_multipart_upload(Bucket=bucket, Key=key, **extra)
    listed = []
    for number, data in enumerate(parts, 1):
        answer = client.upload_part(
            Bucket=bucket, Key=key, UploadId=begun["UploadId"], PartNumber=number, Body=data, **extra
        )
        name = f"Checksum{algorithm}"
        listed.append(
            {"PartNumber": number, "ETag": answer["ETag"], **({name: answer[name]} if algorithm else {})}
        )
    client.complete_multipart_upload(
        Bucket=bucket, Key=key, UploadId=begun["UploadId"], MultipartUpload={"Parts": listed}
    )

"""Copies between stores: proven, gone on with after a break, and never over what somebody else wrote."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptguard.errors import Refused, StoreError
from ckptguard.storage import open_store
from ckptguard.storage._base import Checksum, Proof
from ckptguard.storage._s3_upload import PART
from ckptguard.storage.checksums import Answer, compare
from ckptguard.storage.local import LocalStore
from ckptguard.storage.s3 import S3Store
from ckptguard.storage.transfer import Copier, differing_blocks
from ckptguard.testing import FaultyStore

pytestmark = pytest.mark.s3

Fill = Callable[[Mapping[str, bytes]], str]
BIG = os.urandom(1 << 20) * 37 + b"tail"


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    (tmp_path / "model.bin").write_bytes(BIG)
    (tmp_path / "small").write_bytes(b"12345")
    (tmp_path / "empty").write_bytes(b"")
    return LocalStore(tmp_path)


def test_there_and_back_again(local: LocalStore, s3_bucket: str, tmp_path: Path) -> None:
    there, back = S3Store(f"{s3_bucket}/run"), LocalStore(_folder(tmp_path / "back"))
    for key, size in (("model.bin", len(BIG)), ("small", 5), ("empty", 0)):
        with Copier(local, there) as copier:
            copied = copier.copy(key, f"copy/{key}")
        assert (copied.entry.size, copied.sent, copied.proven_by) == (size, size, "the store's CRC64NVME")
        with Copier(there, back) as copier:
            copier.copy(f"copy/{key}", key)
            assert copier.same(f"copy/{key}", key)
        assert (tmp_path / "back" / key).read_bytes() == (tmp_path / key).read_bytes()
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == ["empty", "model.bin", "small"]
    assert list(there.uploads()) == [] and list(there.list(".ckptguard")) == []


def test_between_buckets_and_prefixes(s3_fill: Fill) -> None:
    url = s3_fill({"a/x": BIG[: PART + 5]})
    with Copier(S3Store(f"{url}/a"), S3Store(f"{url}/b")) as copier:
        copier.copy("x", "y")
    assert S3Store(f"{url}/b").read("y") == BIG[: PART + 5]


class _StopsAfter(FaultyStore):
    """A source that fails for good after so many bytes."""

    budget = 0

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        self.budget -= len(buffer)
        if self.budget < 0:
            raise StoreError("made to fail")
        super().readinto(key, start, buffer)


@pytest.mark.parametrize("way", ["up", "down"])
def test_goes_on_where_it_was_broken_off(local: LocalStore, s3_bucket: str, tmp_path: Path, way: str) -> None:
    there: Any = S3Store(f"{s3_bucket}/run")
    back: Any = LocalStore(_folder(tmp_path / "back"))
    source, destination = (local, there) if way == "up" else (S3Store(_put(there, "model.bin", BIG)), back)
    broken = _StopsAfter(source)
    broken.budget = 2 * PART
    with Copier(broken, destination, threads=1) as copier, pytest.raises(StoreError, match="made to fail"):
        copier.copy("model.bin", "copy.bin")
    assert "copy.bin" not in {e.key for e in destination.list()}
    with Copier(source, destination) as copier:
        copied = copier.copy("model.bin", "copy.bin")
    assert copied.sent == len(BIG) - 2 * PART
    assert destination.read("copy.bin") == BIG


def test_never_over_what_is_there_already(local: LocalStore, s3_fill: Fill, tmp_path: Path) -> None:
    there = S3Store(s3_fill({"small": b"other", "model.bin": b"x"}))
    for destination in (
        there,
        LocalStore(_folder(tmp_path / "back", {"small": b"other", "model.bin": b"x"})),
    ):
        with Copier(local, destination) as copier:
            for key in ("small", "model.bin"):
                with pytest.raises(Refused, match="left as it is"):
                    copier.copy(key, key)
            seen = destination.stat("small")
            copier.copy("small", "small", replace=seen)
            assert destination.read("small") == b"12345"
            with pytest.raises(Refused):
                copier.copy("empty", "small", replace=seen)


def test_two_at_once_make_one_whole_object(local: LocalStore, s3_bucket: str) -> None:
    start = threading.Barrier(2)

    def copy() -> str:
        with Copier(local, S3Store(f"{s3_bucket}/run")) as copier:
            start.wait()
            return copier.copy("model.bin", "model.bin").crc64nvme

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(copy), pool.submit(copy)
        assert first.result() == second.result()
    assert S3Store(f"{s3_bucket}/run").read("model.bin") == BIG


def test_what_arrives_damaged_is_not_called_a_copy(local: LocalStore, tmp_path: Path) -> None:
    back = FaultyStore(LocalStore(_folder(tmp_path / "back")), flip={"small": 3})
    with Copier(local, back) as copier, pytest.raises(StoreError, match="arrived with other bytes"):
        copier.copy("small", "small")
    assert list((tmp_path / "back").iterdir()) == []


def test_a_source_that_changes_is_no_source(local: LocalStore, s3_bucket: str, tmp_path: Path) -> None:
    class Changing(FaultyStore):
        def readinto(self, key: str, start: int, buffer: memoryview) -> None:
            super().readinto(key, start, buffer)
            os.utime(tmp_path / key, (1, 1))

    there = S3Store(f"{s3_bucket}/run")
    with (
        Copier(Changing(local), there) as copier,
        pytest.raises(StoreError, match="changed while it was copied"),
    ):
        copier.copy("model.bin", "model.bin")
    assert list(there.list()) == [] and list(there.uploads()) == []


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256", None])
@pytest.mark.parametrize("parts", [1, 2])
def test_proof_without_download(
    local: LocalStore, s3_client: Any, s3_bucket: str, algorithm: str | None, parts: int, tmp_path: Path
) -> None:
    data = BIG[: 6 << 20]
    (tmp_path / "file").write_bytes(data)
    extra = {"ChecksumAlgorithm": algorithm} if algorithm else {}
    bucket = s3_bucket.removeprefix("s3://")
    if parts == 1:
        s3_client.put_object(Bucket=bucket, Key="file", Body=data, **extra)
    else:
        begun = s3_client.create_multipart_upload(Bucket=bucket, Key="file", **extra)["UploadId"]
        listed = []
        for number, piece in enumerate((data[: 5 << 20], data[5 << 20 :]), 1):
            answer = s3_client.upload_part(
                Bucket=bucket, Key="file", UploadId=begun, PartNumber=number, Body=piece, **extra
            )
            name = f"Checksum{algorithm}"
            listed.append(
                {"PartNumber": number, "ETag": answer["ETag"], **({name: answer[name]} if algorithm else {})}
            )
        s3_client.complete_multipart_upload(
            Bucket=bucket, Key="file", UploadId=begun, MultipartUpload={"Parts": listed}
        )
    store = S3Store(s3_bucket)
    proof = store.proof("file")
    spent = store.requests
    with ThreadPoolExecutor(2) as pool:
        assert compare(LocalStore(tmp_path), "file", proof, pool).answer is Answer.SAME
        damaged = FaultyStore(LocalStore(tmp_path), flip={"file": 5 << 20})
        answer = compare(damaged, "file", proof, pool).answer
    certain = any(c.algorithm for c in proof.checksums)
    assert answer is (Answer.DIFFERENT if certain else Answer.UNKNOWN)
    assert store.requests == spent


def test_a_reading_that_wavers_accuses_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    store = LocalStore(tmp_path)
    proof = Proof(store.stat("file"), (Checksum("crc32", "y/U6HA=="),))
    with ThreadPoolExecutor(1) as pool:
        assert compare(store, "file", proof, pool).answer is Answer.SAME
        wavering = FaultyStore(store, flip_once={"file": 2})
        found = compare(wavering, "file", proof, pool)
    assert (found.answer, "two readings" in found.by) == (Answer.UNKNOWN, True)


def test_differing_blocks_are_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789" * 10)
    store = LocalStore(tmp_path)
    other = FaultyStore(store, flip={"file": 77})
    with ThreadPoolExecutor(2) as pool:
        assert list(differing_blocks(store, "file", other, "file", 100, pool, block=16)) == [(64, 16)]


def test_opened_stores_can_do_all_that_too(s3_fill: Fill, tmp_path: Path) -> None:
    with Copier(open_store(s3_fill({"x": b"1"})), open_store(str(tmp_path))) as copier:
        copier.copy("x", "y")
    assert (tmp_path / "y").read_bytes() == b"1"


def _folder(path: Path, files: Mapping[str, bytes] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    for name, data in (files or {}).items():
        (path / name).write_bytes(data)
    return path


def _put(store: S3Store, key: str, data: bytes) -> str:
    store.put(key, data)
    return store.url

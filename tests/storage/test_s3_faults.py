"""What networks and servers do, done to the S3 store: it repeats what can be repeated, and names the rest."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptguard.errors import Refused, ShortRead, StoreDenied, StoreError
from ckptguard.storage._s3_client import S3Options
from ckptguard.storage.local import LocalStore
from ckptguard.storage.readahead import CHUNK, ReadAhead
from ckptguard.storage.s3 import S3Store
from ckptguard.storage.transfer import Copier
from ckptguard.testing_proxy import Fault, FaultProxy
from ckptguard.testing_s3 import SeaweedServer

pytestmark = pytest.mark.s3

Fill = Callable[[Mapping[str, bytes]], str]
DATA = os.urandom(1 << 20) * 3 + b"end"
PATIENT = S3Options(connect_timeout=2, read_timeout=1, attempts=3)


@pytest.fixture
def proxy(s3_server: SeaweedServer, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        yield proxy


@pytest.mark.parametrize(
    "fault",
    [
        Fault("reset", after=100_000),
        Fault("cut", after=1_000_000, times=2),
        Fault("length", after=500),
        Fault("stall", after=10, seconds=3),
        Fault("status", status=500),
        Fault("status", status=503, code="SlowDown", times=2),
    ],
    ids=lambda f: f"{f.kind}-{f.status}",
)
def test_what_passes_is_repeated(s3_fill: Fill, proxy: FaultProxy, fault: Fault) -> None:
    store = S3Store(s3_fill({"a": DATA}), PATIENT)
    proxy.faults = [fault]
    assert store.read("a", 0, len(DATA)) == DATA
    assert fault.times == 0


def test_what_was_read_is_not_read_again(s3_fill: Fill, proxy: FaultProxy) -> None:
    store = S3Store(s3_fill({"a": DATA}), PATIENT)
    proxy.faults = [Fault("cut", after=2_000_000)]
    assert store.read("a", 0, len(DATA)) == DATA
    ranges = [headers["Range"] for method, path, headers in proxy.seen if method == "GET"]
    assert len(ranges) == 2 and int(ranges[1].removeprefix("bytes=").partition("-")[0]) > 1_400_000


@pytest.mark.parametrize(
    "fault, message",
    [
        (Fault("cut", after=10, times=99), "reading failed 3 times at byte"),
        (Fault("status", status=500, times=99), "GetObject failed: InternalError"),
        (Fault("status", status=503, code="SlowDown", times=99), "asks to slow down"),
        (Fault("status", status=403, code="AccessDenied", times=99), "s3:GetObject is not allowed"),
        (Fault("status", status=400, code="ExpiredToken", times=99), "credentials have expired"),
        (Fault("status", status=403, code="RequestTimeTooSkewed", times=99), "clock differs too much"),
        (Fault("status", status=301, code="PermanentRedirect", times=99), "wrong region"),
    ],
    ids=lambda v: v.code if isinstance(v, Fault) else None,
)
def test_what_stays_is_named(s3_fill: Fill, proxy: FaultProxy, fault: Fault, message: str) -> None:
    store = S3Store(s3_fill({"a": DATA, "b": b"fine"}), PATIENT)
    fault.key = "/a"
    proxy.faults = [fault]
    with pytest.raises(StoreError, match=message) as caught:
        store.read("a", 0, len(DATA))
    assert caught.value.hint
    assert isinstance(caught.value, StoreDenied) == (caught.value.error_code == "denied")
    assert store.read("b") == b"fine"


def test_a_stale_listing_that_promises_too_much_is_a_short_read(
    s3_fill: Fill, proxy: FaultProxy, s3_bucket: str
) -> None:
    store = S3Store(s3_fill({"a": DATA}), PATIENT)
    (stale,) = list(store.list())
    s3_fill({"a": DATA[:1000]})
    proxy.faults = [Fault("stale", times=1)]
    (again,) = list(store.list())
    assert again.size == stale.size
    assert store.stat("a").size == 1000
    with pytest.raises(ShortRead):
        store.read("a", 500, stale.size - 500)


def test_reading_ahead_gives_the_same_bytes_and_errors(s3_fill: Fill, proxy: FaultProxy) -> None:
    data = DATA * 12
    inner = S3Store(s3_fill({"a": data}), PATIENT)
    store = ReadAhead(inner)
    list(store.list())
    step = 1 << 20

    def read(start: int) -> bool:
        return store.read("a", start, min(step, len(data) - start)) == data[start : start + step]

    proxy.faults = [Fault("cut", after=123_456), Fault("reset", after=7), Fault("status", status=500)]
    before = inner.requests
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(read, range(0, len(data), step)))
    assert inner.requests - before < len(data) / step / 2
    store.forget()
    proxy.faults = [Fault("status", status=403, code="AccessDenied", times=999)]
    with pytest.raises(StoreDenied):
        for start in range(0, 3 * CHUNK, step):
            read(start)
    store.close()


def test_a_damaged_answer_while_copying_is_caught(s3_fill: Fill, proxy: FaultProxy, tmp_path: Path) -> None:
    store = S3Store(s3_fill({"a": DATA}), PATIENT)
    proxy.faults = [Fault("flip", after=1000)]
    with Copier(store, LocalStore(tmp_path)) as copier, pytest.raises(StoreError, match="other bytes"):
        copier.copy("a", "a")


def test_the_server_dies_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of listing, reading and uploading."""
    with SeaweedServer(tmp_path / "server") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        server.client().create_bucket(Bucket="mortal")
        options = S3Options(connect_timeout=2, read_timeout=5, attempts=10, page=3)
        store = S3Store("s3://mortal/run", options)
        for n in range(7):
            store.put(f"small/{n}", b"x")
        (tmp_path / "disk").mkdir()
        (tmp_path / "disk/big").write_bytes(DATA * 20)
        disk = LocalStore(tmp_path / "disk")
        with Copier(disk, store) as copier:
            copier.copy("big", "big")
        listing, killed = store.list("small"), threading.Event()
        seen = [next(listing).key]

        def upload() -> bytes:
            with Copier(
                disk, store, progress=lambda count: killed.set() if not killed.is_set() else None
            ) as copier:
                copier.copy("big", "again")
            return store.read("again")

        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(upload)
            assert killed.wait(30)
            server.kill()
            time.sleep(0.2)
            server.start()
            seen += [e.key for e in listing]
            assert store.read("big") == DATA * 20
            assert later.result() == DATA * 20
        assert seen == [f"small/{n}" for n in range(7)]


@pytest.mark.parametrize("size", [1000, 20 << 20])
@pytest.mark.parametrize("code", ["NotImplemented", "InvalidRequest"])
def test_a_server_that_knows_neither_checksums_nor_conditions(
    s3_fill: Fill, proxy: FaultProxy, tmp_path: Path, size: int, code: str
) -> None:
    """It is written to without them, what is there is looked at first, and what arrived is compared."""
    store = S3Store(s3_fill({"taken": b"mine"}), PATIENT)
    data = (DATA * 7)[:size]
    (tmp_path / "a").write_bytes(data)

    def refuse(method: str, path: str, headers: Mapping[str, str]) -> bool:
        names = {name.lower() for name in headers}
        knows = {"x-amz-checksum-crc64nvme", "x-amz-checksum-algorithm", "if-none-match", "if-match"}
        return method in ("PUT", "POST") and bool(names & knows)

    proxy.refuse = lambda method, path, headers: (501, code) if refuse(method, path, headers) else None
    with Copier(LocalStore(tmp_path), store) as copier:
        copied = copier.copy("a", "b")
        assert copied.proven_by.startswith("the store's ")
        assert store.lacks == {"checksums", "conditions"}
        with pytest.raises(Refused, match="left as it is"):
            copier.copy("a", "taken")
    assert store.read("b") == data and store.read("taken") == b"mine"

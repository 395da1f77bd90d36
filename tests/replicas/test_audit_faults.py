"""What the store does to an audit is never held against the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptguard.inspect import Options, audit
from ckptguard.model import Resume, Verdict
from ckptguard.testing_proxy import Fault, FaultProxy

pytestmark = pytest.mark.s3


class Bench:
    """A run in a bucket behind a proxy."""

    def __init__(self, run: Path, url: str, proxy: FaultProxy, client: Any) -> None:
        self.run, self.url, self.proxy, self.client = run, f"{url}/runs/a", proxy, client
        self.bucket = url.removeprefix("s3://")
        for path in sorted(p for p in run.rglob("*") if p.is_file()):
            self.put(path.relative_to(run).as_posix(), path.read_bytes())

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"runs/a/{key}", Body=data)

    def audit(self) -> dict[int | None, Verdict]:
        (report,) = audit(self.url, Options(grace=0))
        return {v.step: v for v in report.checkpoints}


@pytest.fixture
def bench(
    make_run: Callable[[], Path], s3_bucket: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    with FaultProxy(s3_server.port) as proxy:
        bench = Bench(make_run(), s3_bucket, proxy, s3_server.client())
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        yield bench


def codes(verdict: Verdict) -> set[str]:
    return {f.code for f in verdict.findings if f.loud or f.effect != "none"}


@pytest.mark.parametrize(
    "fault",
    [Fault("status", status=403, code="AccessDenied", times=999), Fault("status", status=500, times=999)],
    ids=["403", "500"],
)
def test_a_read_that_fails_leaves_the_verdict_open(bench: Bench, fault: Fault) -> None:
    fault.key = "checkpoint-20/optimizer.pt"
    bench.proxy.faults = [fault]
    found = bench.audit()
    assert (found[20].resume, codes(found[20])) == (Resume.UNKNOWN, {"unreadable"})
    assert found[10].resume is found[30].resume is Resume.EXACT
    (finding,) = (f for f in found[20].findings if f.code == "unreadable")
    assert "optimizer.pt" in finding.subject


def test_bytes_that_were_damaged_on_the_way_are_read_again(bench: Bench) -> None:
    bench.proxy.faults = [Fault("flip", key="checkpoint-20/optimizer.pt", after=100_000)]
    found = bench.audit()[20]
    assert "crc-mismatch" not in codes(found)
    assert found.resume is not Resume.UNSAFE
    assert bench.audit()[20].resume is Resume.EXACT


def test_an_object_replaced_during_the_look_is_looked_at_anew(bench: Bench) -> None:
    other = (bench.run / "checkpoint-20/optimizer.pt").read_bytes()
    left = [1]

    def replace(method: str, path: str) -> None:
        if method == "GET" and "checkpoint-20/optimizer.pt" in path and left[0]:
            left[0] -= 1
            bench.put("checkpoint-20/optimizer.pt", other + b"")
            bench.client.put_object(
                Bucket=bench.bucket,
                Key="runs/a/checkpoint-20/scheduler.pt",
                Body=(bench.run / "checkpoint-20/scheduler.pt").read_bytes(),
            )

    bench.proxy.before = replace
    assert bench.audit()[20].resume is Resume.EXACT
    count = [0]

    def always(method: str, path: str) -> None:
        if method == "GET" and "checkpoint-20/optimizer.pt" in path:
            count[0] += 1
            bench.put("checkpoint-20/optimizer.pt", other + bytes([count[0] % 256]))

    bench.proxy.before = always
    found = bench.audit()[20]
    assert "changed-while-read" in codes(found)
    assert found.resume is Resume.UNKNOWN


def test_a_store_that_goes_away_is_no_verdict(
    bench: Bench, ckptguard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    done = ckptguard("audit", bench.url, "--json")
    assert done.exit_code == 2
    assert '"code": "unreachable"' in done.stdout
    assert ckptguard("preflight", bench.url).exit_code == 2

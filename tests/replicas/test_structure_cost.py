"""At `structure` only headers are fetched: measured at the wire, between client and server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptguard.inspect import Options, audit
from ckptguard.model import Evidence, Verdict
from ckptguard.testing_proxy import FaultProxy

pytestmark = pytest.mark.s3


@pytest.fixture
def proxy(s3_server: Any, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        yield proxy


def state(tensors: int, elements: int) -> dict[str, Any]:
    model = {f"blocks.{n}.weight": torch.zeros(elements) for n in range(tensors)}
    moments = {
        n: {"step": torch.tensor(7.0), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
        for n in range(3)
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0, 1, 2]}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "step": 7}


def look(proxy: FaultProxy, client: Any, url: str, files: list[Path]) -> tuple[Verdict, int, int]:
    """The verdict at `structure`, the bytes that came over the wire, and the requests for objects."""
    for path in files:
        client.upload_file(str(path), url.removeprefix("s3://"), f"runs/a/{path.name}")
    proxy.seen.clear()
    proxy.bytes_down = 0
    (report,) = audit(f"{url}/runs/a", Options(depth=Evidence.STRUCTURE, grace=0))
    gets = sum(method == "GET" and "list-type" not in path for method, path, _ in proxy.seen)
    return report.checkpoints[0], proxy.bytes_down, gets


def test_a_hundred_megabytes(proxy: FaultProxy, s3_server: Any, s3_bucket: str, tmp_path: Path) -> None:
    torch.save(state(100, 256 << 10), tmp_path / "ckpt_7.pt")
    verdict, came, requests = look(proxy, s3_server.client(), s3_bucket, [tmp_path / "ckpt_7.pt"])
    assert verdict.step == 7 and verdict.evidence is Evidence.STRUCTURE
    assert came < verdict.bytes / 100
    assert requests <= 12


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_ten_thousand_tensors_are_no_ten_thousand_requests(
    proxy: FaultProxy, s3_server: Any, s3_bucket: str, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / ("ckpt_7.pt" if kind == "torch" else "model_7.safetensors")
    if kind == "torch":
        torch.save(state(10_000, 64), path)
    else:
        save_file(state(10_000, 64)["model"], path)
    _, _, requests = look(proxy, s3_server.client(), s3_bucket, [path])
    assert requests <= 20


def test_nothing_is_written_to_disk(
    s3_server: Any, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(state(10, 1000), tmp_path / "ckpt_7.pt")
    s3_server.client().upload_file(
        str(tmp_path / "ckpt_7.pt"), s3_bucket.removeprefix("s3://"), "runs/a/ckpt_7.pt"
    )
    here = tmp_path / "empty"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("TMPDIR", str(here))
    audit(f"{s3_bucket}/runs/a")
    assert list(here.iterdir()) == []

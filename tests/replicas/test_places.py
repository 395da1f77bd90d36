"""Where a named checkpoint lies: its run is the folder that keeps things of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptguard.errors import TargetNotFound, UsageError
from ckptguard.places import Place, join, place_of
from ckptguard.testing_s3 import fill


@pytest.mark.parametrize(
    "root, key, path",
    [
        ("runs/a", "c", "runs/a/c"),
        ("runs/a/", "c", "runs/a/c"),
        (".", "c", "c"),
        ("s3://b", "c", "s3://b/c"),
        ("r", "", "r"),
    ],
)
def test_join(root: str, key: str, path: str) -> None:
    assert join(root, key) == path


def test_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/checkpoints/c-10").mkdir(parents=True)
    (tmp_path / "a/ckpt.pt").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    assert place_of("a/checkpoints/c-10/") == Place("a/checkpoints", "c-10")
    assert place_of("a/ckpt.pt") == Place("a", "ckpt.pt")
    (tmp_path / "a/.ckptguard/seals").mkdir(parents=True)
    assert place_of("a/checkpoints/c-10") == Place("a", "checkpoints/c-10")
    monkeypatch.chdir(tmp_path / "a/checkpoints")
    place = place_of("c-10")
    assert (Path(place.run).resolve(), place.key) == (tmp_path / "a", "checkpoints/c-10")
    with pytest.raises(TargetNotFound):
        place_of("a/none")


@pytest.mark.s3
def test_on_s3(s3_bucket: str, s3_server: Any) -> None:
    def put(objects: Mapping[str, bytes]) -> None:
        fill(s3_server.client(), s3_bucket.removeprefix("s3://"), objects)

    put({"c-10/x": b"1", "ckpt.pt": b"1", "a/checkpoints/c-10/x": b"1"})
    assert place_of(f"{s3_bucket}/c-10") == Place(s3_bucket, "c-10")
    assert place_of(f"{s3_bucket}/ckpt.pt") == Place(s3_bucket, "ckpt.pt")
    assert place_of(f"{s3_bucket}/a/checkpoints/c-10") == Place(f"{s3_bucket}/a/checkpoints", "c-10")
    put({"a/.ckptguard/seals/checkpoints/c-10.json": b"{}"})
    assert place_of(f"{s3_bucket}/a/checkpoints/c-10") == Place(f"{s3_bucket}/a", "checkpoints/c-10")
    with pytest.raises(UsageError, match="a whole bucket"):
        place_of(s3_bucket)

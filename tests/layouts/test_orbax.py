"""Orbax directories: names, marks, and the CRC-32C of manifests and nodes. Files as TensorStore lays them out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptguard import testing_damage as damage
from ckptguard.formats.ocdbt import MANIFEST, NODE, crc32c
from ckptguard.testing_layouts import LayoutContract


def sealed(magic: bytes, body: bytes) -> bytes:
    """A manifest or node: signature, length, version and compression, body, CRC-32C."""
    blob = magic + (len(body) + 18).to_bytes(8, "little") + b"\0\1" + body
    return blob + crc32c(blob).to_bytes(4, "little")


def save(folder: Path, step: int) -> None:
    names = ["params.w", "params.b", "opt_state.mu.w", "opt_state.nu.w", "rng", "step"]
    tree = {
        str(tuple(n.split("."))): {
            "key_metadata": [{"key": k, "key_type": 2} for k in n.split(".")],
            "value_metadata": {"value_type": "jax.Array", "write_shape": [4, 4]},
        }
        for n in names
    }
    top = folder / str(step)
    store = top / "state" / "ocdbt.process_0"
    for place in (top / "state" / "d", store / "d", top / "data"):
        place.mkdir(parents=True)
    (top / "_CHECKPOINT_METADATA").write_text(
        json.dumps({"item_handlers": {}, "commit_timestamp_nsecs": 7 + step})
    )
    (top / "state" / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "use_ocdbt": True}))
    (top / "state" / "manifest.ocdbt").write_bytes(sealed(MANIFEST, bytes(range(90))))
    (top / "state" / "d" / "aa").write_bytes(sealed(NODE, bytes(range(100, 200))))
    (store / "manifest.ocdbt").write_bytes(sealed(MANIFEST, bytes(range(200))))
    (store / "d" / "bb").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(3000) + sealed(NODE, bytes(range(50, 150))))
    (top / "data" / "metadata").write_text('{"position": 80}')
    for place in (top, top / "state", top / "data"):
        (place / "commit_success.txt").write_text("committed")


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax")
    save(folder, 10)
    save(folder, 20)
    return folder


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_a_healthy_run_is_exact_and_silent(run: Path, look: Callable) -> None:
    seen = look(run)
    assert seen.loud == []
    assert [(v.layout, v.step, v.resume.value) for v in seen.verdicts.values()] == [
        ("orbax", 10, "exact"),
        ("orbax", 20, "exact"),
    ]
    assert all(0 < v.coverage.bytes_proven < v.bytes for v in seen.verdicts.values())


DAMAGES: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "a manifest lost": (lambda c: damage.drop(c / "state/manifest.ocdbt"), {"missing-file"}),
    "a manifest's bit": (lambda c: damage.flip(c / "state/manifest.ocdbt", at=40), {"crc-mismatch"}),
    "a manifest cut": (
        lambda c: damage.truncate(c / "state/ocdbt.process_0/manifest.ocdbt", 0.5),
        {"truncated"},
    ),
    "a node's bit": (lambda c: damage.flip(c / "state/ocdbt.process_0/d/bb", at=-20), {"crc-mismatch"}),
    "a node cut": (lambda c: damage.truncate(c / "state/d/aa", 0.5), {"truncated"}),
    "an empty data file": (lambda c: damage.empty(c / "state/ocdbt.process_0/d/bb"), {"empty-file"}),
    "the mark of the commit": (lambda c: damage.drop(c / "commit_success.txt"), {"incomplete-save"}),
    "the checkpoint's metadata": (lambda c: damage.drop(c / "_CHECKPOINT_METADATA"), {"missing-file"}),
    "the tree of names": (
        lambda c: (c / "state/_METADATA").write_text('{"tree_metadata": {"a'),
        {"truncated"},
    ),
    "a commit that never was": (
        lambda c: (c / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": null}'),
        {"incomplete-save"},
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_named(run: Path, look: Callable, damaged: Callable, what: str) -> None:
    how, expected = DAMAGES[what]
    seen = look(damaged(run, lambda r: how(r / "20")))
    assert expected <= seen.codes("20"), seen.loud
    assert (seen.resume("20"), seen.resume("10")) == ("unsafe", "exact")


def test_a_temporary_name_is_no_checkpoint_once_it_is_overtaken(
    run: Path, look: Callable, damaged: Callable
) -> None:
    seen = look(damaged(run, lambda r: (r / "10").rename(r / "10.orbax-checkpoint-tmp-0")))
    assert list(seen.verdicts) == ["20"]
    assert {f.code for f in seen.findings} >= {"debris"}


class TestContract(LayoutContract):
    name = "orbax"
    count = 2
    holds = frozenset({"model", "optimizer", "rng", "dataloader"})

    @pytest.fixture
    def sample(self, run: Path) -> Path:
        return run

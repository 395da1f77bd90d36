"""Composer's files, links and tar archives, in the form that its Trainer gives them."""

from __future__ import annotations

import os
import random
import tarfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptguard import testing_damage as damage
from ckptguard.testing_layouts import LayoutContract

torch = pytest.importorskip("torch")


def checkpoint(batch: int, *, world: int = 2, weights_only: bool = False) -> dict[str, Any]:
    """What `Trainer.save_checkpoint` of Composer 0.32 puts into a file (core/state.py, core/time.py)."""
    torch.manual_seed(batch)
    net = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
    for _ in range(batch):
        net(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    metadata = {
        "composer_env_info": {"composer_version": "0.32.1"},
        "torch_version": "2.13.0",
        "device": "cpu",
        "precision": "fp32",
        "world_size": world,
    }
    if weights_only:
        return {"state": {"model": net.state_dict(), "integrations": {}, "metadata": metadata}}
    stamp = {
        "iteration": 0,
        "epoch": 0,
        "batch": batch,
        "sample": batch * 8,
        "token": 0,
        "batch_in_epoch": batch,
        "total_wct": timedelta(seconds=1),
    }
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.random.get_rng_state()}
    return {
        "state": {
            "model": net.state_dict(), "optimizers": {"AdamW": optimizer.state_dict()}, "schedulers": {"LambdaLR": schedule.state_dict()},
            "algorithms": [], "callbacks": {"CheckpointSaver": {}}, "scaler": {}, "timestamp": stamp, "rank_zero_seed": 1, "run_name": "a",
            "dataset_state": {"train": None, "eval": {}}, "integrations": {}, "metadata": metadata,
        },
        "rng": [rng] * world,
    }  # fmt: skip


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("composer")
    for batch in (2, 4, 6):
        torch.save(checkpoint(batch), folder / f"ep0-ba{batch}-rank0.pt")
    os.symlink("ep0-ba6-rank0.pt", folder / "latest-rank0.pt")
    return folder


def test_a_healthy_run_is_exact_and_silent(run: Path, look: Callable) -> None:
    seen = look(run)
    assert seen.loud == []
    assert [(v.layout, v.step, v.resume.value) for v in seen.verdicts.values()] == [
        ("composer", n, "exact") for n in (2, 4, 6)
    ]
    assert seen.reports[0].latest == f"{run}/ep0-ba6-rank0.pt"


def test_a_name_of_ones_own_is_recognised_by_content(run: Path, look: Callable, tmp_path: Path) -> None:
    torch.save(checkpoint(4), tmp_path / "mine_4.pt")
    seen = look(tmp_path)
    assert (seen.verdicts["mine_4.pt"].layout, seen.resume("mine_4.pt"), seen.loud) == (
        "composer",
        "exact",
        [],
    )


def test_weights_only_is_lossy_by_configuration(look: Callable, tmp_path: Path) -> None:
    torch.save(checkpoint(4, weights_only=True), tmp_path / "ep0-ba4-rank0.pt")
    seen = look(tmp_path)
    assert (seen.resume("ep0-ba4-rank0.pt"), seen.loud) == ("lossy", [])


def test_a_tar_is_read_in_place_with_its_checksums(look: Callable, tmp_path: Path) -> None:
    states = tmp_path / "composer_states.pt"
    torch.save(checkpoint(4), states)
    path = tmp_path / "run" / "ep0-ba4-rank0.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w") as archive:
        archive.add(states, "composer_states.pt")
    seen = look(path.parent)
    assert (seen.verdicts[path.name].layout, seen.resume(path.name), seen.loud) == ("composer", "exact", [])
    weight = torch.load(states, weights_only=False)["state"]["model"]["0.weight"].numpy().tobytes()
    damage.flip(path, at=path.read_bytes().index(weight) + 9)
    assert "crc-mismatch" in look(path.parent).codes(path.name)
    damage.truncate(path, 0.4)
    assert "truncated" in look(path.parent).codes(path.name)


def test_a_compressed_file_is_neither_good_nor_bad(look: Callable, tmp_path: Path) -> None:
    (tmp_path / "ep0-ba4-rank0.pt.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(400))
    seen = look(tmp_path)
    assert seen.resume("ep0-ba4-rank0.pt.zst") == "unknown"
    assert seen.codes("ep0-ba4-rank0.pt.zst") == set()
    assert any(f.code == "unreadable" and "zst" in f.message for f in seen.findings)


DAMAGES: dict[str, tuple[Callable[[Path], object], set[str], str]] = {
    "RNG of one rank": (
        lambda p: damage.resave(p, lambda s: s["rng"].__delitem__(1)),
        {"missing-rank"},
        "lossy",
    ),
    "another batch": (
        lambda p: damage.resave(p, lambda s: s["state"]["timestamp"].update(batch=5)),
        {"step-mismatch"},
        "lossy",
    ),
    "another epoch": (
        lambda p: damage.resave(p, lambda s: s["state"]["timestamp"].update(epoch=3)),
        {"step-mismatch"},
        "lossy",
    ),
    "no optimizer": (
        lambda p: damage.resave(p, lambda s: s["state"].__delitem__("optimizers")),
        {"missing-optimizer"},
        "lossy",
    ),
    "half a file": (lambda p: damage.truncate(p, 0.5), {"truncated"}, "unsafe"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_named(run: Path, look: Callable, damaged: Callable, what: str) -> None:
    how, expected, resume = DAMAGES[what]
    seen = look(damaged(run, lambda r: how(r / "ep0-ba6-rank0.pt")))
    assert expected <= seen.codes("ep0-ba6-rank0.pt"), seen.loud
    assert seen.resume("ep0-ba6-rank0.pt") == resume


def test_a_symlink_file_is_followed(run: Path, look: Callable, damaged: Callable) -> None:
    """In an object store the link is a small file with the remote path in it."""

    def remote(folder: Path) -> None:
        (folder / "latest-rank0.pt").unlink()
        (folder / "latest-rank0.pt.symlink").write_text("my-run/checkpoints/ep0-ba8-rank0.pt")

    assert "dangling-pointer" in {f.code for f in look(damaged(run, remote)).findings}


class TestContract(LayoutContract):
    name = "composer"
    count = 3
    holds = frozenset({"model", "optimizer", "scheduler", "rng"})

    @pytest.fixture
    def sample(self, run: Path) -> Path:
        return run

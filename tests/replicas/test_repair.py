"""Damaged checkpoints are healed from their copies, block by block, and never made worse."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptguard.errors import Refused
from ckptguard.mending import apply_repair, drop_damaged
from ckptguard.model import Manifest
from ckptguard.repair import RepairPlan, plan_repair
from ckptguard.replica_look import list_tree
from ckptguard.replicate import replicate
from ckptguard.seals import Seal, read_seal, seal_file, write_seal
from ckptguard.storage import open_store
from ckptguard.storage.local import LocalStore
from ckptguard.testing import FaultyStore

pytestmark = pytest.mark.s3


class Patient:
    """A run with a good copy in a bucket, whose checkpoint-20 a test may damage."""

    def __init__(self, run: Path, url: str, sealed: bool) -> None:
        self.run, self.url, self.path, self.sealed = run, url, "checkpoint-20", sealed
        self.folder = run / self.path
        (self.folder / "notes.txt").write_text("mine")
        store = LocalStore(run)
        manifest = self.manifest(store)
        if sealed:
            files = {f.name: seal_file(store, f.entry, 4096) for f in manifest.files}
            write_seal(store, "", Seal(checkpoint=self.path, files=files, block_size=4096))
        replicate(store, manifest, open_store(url), now=time.time())  # type: ignore[arg-type]
        self.good = {p.name: p.read_bytes() for p in self.folder.iterdir()}
        self.times = {p.name: p.stat().st_mtime for p in (*self.folder.iterdir(), self.folder)}

    def manifest(self, store: Any) -> Manifest:
        return next(m for m in list_tree(store).checkpoints if m.path == self.path)

    def damage(self, name: str, at: int) -> None:
        path = self.folder / name
        data = bytearray(self.good[name])
        data[at] ^= 1
        path.write_bytes(data)
        os.utime(path, (self.times[name],) * 2)

    def plan(self, replica: Any = None) -> RepairPlan:
        store, replica = LocalStore(self.run), replica or open_store(self.url)
        seal = read_seal(store, "", self.path)
        here = self.manifest(store) if self.folder.exists() else None
        assert (seal is not None) is self.sealed
        return plan_repair(store, here, self.path, replica, self.manifest(open_store(self.url)), seal)

    def heal(self, replica: Any = None) -> tuple[str, ...]:
        store = LocalStore(self.run)
        before = {f.name: f.entry for f in self.manifest(store).files} if self.folder.exists() else {}
        return apply_repair(store, self.plan(replica), replica or open_store(self.url), before, "now")

    def is_well(self) -> bool:
        return {p.name: p.read_bytes() for p in self.folder.iterdir()} == self.good


@pytest.fixture(params=[True, False], ids=["sealed", "unsealed"])
def patient(make_run: Callable[[], Path], s3_bucket: str, request: pytest.FixtureRequest) -> Patient:
    return Patient(make_run(), f"{s3_bucket}/run", request.param)


def test_a_sound_checkpoint_needs_nothing(patient: Patient) -> None:
    plan = patient.plan()
    assert (plan.damaged, plan.fetched) == ((), 0)
    assert plan.by == ("seal" if plan.files[0].sealed else "replica")


def test_only_damaged_blocks_are_fetched(patient: Patient) -> None:
    patient.damage("model.safetensors", 10_000)
    patient.damage("optimizer.pt", 5000)
    plan = patient.plan()
    assert sorted(f.name for f in plan.damaged) == ["model.safetensors", "optimizer.pt"]
    if plan.by == "seal":
        assert plan.fetched == 2 * 4096
    assert not patient.is_well()  # a plan changes nothing

    (kept,) = patient.heal()
    assert patient.is_well()
    damaged = (patient.run / kept / "model.safetensors").read_bytes()
    assert (
        len(damaged) == len(patient.good["model.safetensors"])
        and damaged != patient.good["model.safetensors"]
    )
    # Seals know a file by its time, and trainers rotate by the folder's.
    assert {p.name: p.stat().st_mtime for p in (*patient.folder.iterdir(), patient.folder)} == patient.times
    assert patient.plan().damaged == ()
    assert [m.path for m in list_tree(LocalStore(patient.run)).checkpoints] == [
        f"checkpoint-{n}" for n in (10, 20, 30)
    ]
    assert drop_damaged(patient.run, patient.path) == [kept]
    assert not (patient.run / kept).exists()


def test_missing_and_cut_files_come_back(patient: Patient) -> None:
    (patient.folder / "scheduler.pt").unlink()
    with (patient.folder / "optimizer.pt").open("r+b") as file:
        file.truncate(9000)
    patient.heal()
    assert patient.is_well()


def test_a_whole_checkpoint_comes_back(patient: Patient) -> None:
    patient.folder.rename(patient.run.parent / "gone")
    assert patient.heal() == ()
    assert patient.is_well()


def test_a_damaged_replica_makes_nothing_worse(make_run: Callable[[], Path], s3_bucket: str) -> None:
    patient = Patient(make_run(), f"{s3_bucket}/run", True)
    patient.damage("optimizer.pt", 5000)
    bad = FaultyStore(open_store(patient.url), flip={"checkpoint-20/optimizer.pt": 5001})
    with pytest.raises(Refused, match="not what was sealed either"):
        patient.heal(bad)
    assert sorted(p.name for p in (patient.run / ".ckptguard/repair").iterdir()) == ["checkpoint-20.lock"]
    patient.heal()
    assert patient.is_well()


def test_another_save_is_no_replica(patient: Patient) -> None:
    (patient.folder / "pytorch_model.bin").write_bytes(b"another")
    if patient.sealed:
        assert patient.plan().damaged == ()  # the seal knows what belongs to it; the rest is carried along
    else:
        with pytest.raises(Refused, match="no copy of the same save"):
            patient.plan()


def test_what_changed_meanwhile_is_left(patient: Patient) -> None:
    patient.damage("optimizer.pt", 5000)
    store = LocalStore(patient.run)
    before = {f.name: f.entry for f in patient.manifest(store).files}
    plan = patient.plan()
    (patient.folder / "optimizer.pt").write_bytes(b"saved anew")
    with pytest.raises(Refused, match="changed while it was repaired"):
        apply_repair(store, plan, open_store(patient.url), before, "now")
    assert (patient.folder / "optimizer.pt").read_bytes() == b"saved anew"

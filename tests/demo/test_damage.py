"""The demo's damages: each changes what it says, in a copy, and leaves the run alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptguard.demo.damage import DAMAGES, Damage, copy_run, what_torch_says
from ckptguard.demo.story import MARK, prepare
from ckptguard.demo.training import train
from ckptguard.errors import UsageError
from ckptguard.record import fingerprint


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage") / "run"
    train(folder, steps=5, every=2)
    return folder


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_a_damage_changes_only_the_newest_of_the_copy(damage: Damage, run: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.glob("step-*.pt")}
    copy_run(run, tmp_path / "copy", sorted(run.glob("step-*.pt")))
    newest, previous = tmp_path / "copy/step-4.pt", tmp_path / "copy/step-2.pt"
    damage.make(tmp_path / "copy", newest, previous)
    assert newest.read_bytes() != before["step-4.pt"] and previous.read_bytes() == before["step-2.pt"]
    assert {path.name: path.read_bytes() for path in run.glob("step-*.pt")} == before
    if damage.name == "truncated":
        assert "Error" in what_torch_says(newest)
        return
    assert what_torch_says(newest) == "loaded without a word"
    good, bad = torch.load(run / "step-4.pt", weights_only=False), torch.load(newest, weights_only=False)
    changed = {key for key in good if key not in bad or fingerprint(good[key]) != fingerprint(bad[key])}
    assert (
        changed
        <= {
            "flipped-bit": {"model", "optimizer"},
            "no-optimizer": {"optimizer"},
            "other-scheduler": {"scheduler"},
            "skipped-batch": {"dataloader"},
        }[damage.name]
    )
    assert len(changed) == 1


def test_the_demo_takes_no_folder_of_somebody_else(tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter-1.tex").write_text("years of work")
    with pytest.raises(UsageError, match="is not an earlier demo"):
        prepare(folder)
    assert (folder / "chapter-1.tex").exists()
    prepare(tmp_path / "new")
    (tmp_path / "new" / "left-over").write_text("x")
    prepare(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [MARK]

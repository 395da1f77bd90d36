"""Lightning's own checkpoints: silence on healthy runs in the variants that people use, the right words on damaged ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptguard import testing_damage as damage
from ckptguard.testing_layouts import LayoutContract

pytestmark = pytest.mark.lightning
pytest.importorskip("lightning")

WHOLE = (
    "plain", "link", "epochs", "plateau", "accumulated", "frozen-sgd", "gan", "ema", "resumed", "stateful", "named-by-hand", "sharded",
)  # fmt: skip
LAST = "epoch=2-step=24.ckpt"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, write_runs: Callable[..., Path]) -> Path:
    return write_runs("lightning_runs.py", tmp_path_factory.mktemp("lightning"), (*WHOLE, "weights-only"))


@pytest.mark.parametrize("name", WHOLE)
def test_a_healthy_run_is_exact_and_silent(runs: Path, look: Callable, name: str) -> None:
    seen = look(runs / name)
    assert seen.loud == []
    assert {v.resume.value for v in seen.verdicts.values()} == {"exact"}
    assert {v.layout for v in seen.verdicts.values()} == {"lightning"}


def test_weights_only_is_lossy_by_configuration(runs: Path, look: Callable) -> None:
    seen = look(runs / "weights-only")
    assert seen.loud == []
    assert {v.resume.value for v in seen.verdicts.values()} == {"lossy"}


def test_a_link_to_the_last_is_a_pointer_and_a_copy_is_a_checkpoint(runs: Path, look: Callable) -> None:
    assert os.path.islink(runs / "link" / "last.ckpt")
    assert "last.ckpt" not in look(runs / "link").verdicts
    assert look(runs / "plain").verdicts["last.ckpt"].step == 24


def test_averaged_weights_are_told_from_the_raw_ones(runs: Path) -> None:
    import torch

    from ckptguard.formats import parse
    from ckptguard.layouts._lightning_state import interpret_tree
    from ckptguard.layouts._state import Builder
    from ckptguard.layouts.lightning import LAYOUT
    from ckptguard.model import Directory, Entry
    from ckptguard.storage.local import LocalStore

    path = runs / "ema" / LAST
    (manifest,) = LAYOUT.claim(
        Directory("", {LAST: Entry(LAST, path.stat().st_size, 0.0)}, {}), lambda d: None
    )
    builder = Builder(manifest)
    interpret_tree(builder, parse(LocalStore(path.parent), LAST, path.stat().st_size, "torch").tree, LAST)
    saved = torch.load(path, weights_only=False)
    raw, averaged = builder.model["up.bias"], builder.ema["up.bias"]
    assert raw.value.tolist() == saved["current_model_state"]["up.bias"].tolist()
    assert averaged.value.tolist() == saved["state_dict"]["up.bias"].tolist()
    assert raw.value.tolist() != averaged.value.tolist()


def test_a_name_of_ones_own_is_recognised_by_content(runs: Path, look: Callable, tmp_path: Path) -> None:
    shutil.copy2(runs / "plain" / LAST, tmp_path / "mine_24.ckpt")
    seen = look(tmp_path)
    assert (seen.verdicts["mine_24.ckpt"].layout, seen.resume("mine_24.ckpt"), seen.loud) == (
        "lightning",
        "exact",
        [],
    )


def test_a_link_to_itself_names_nothing(runs: Path, look: Callable, damaged: Callable) -> None:
    seen = look(damaged(runs / "epochs", lambda r: os.symlink("last.ckpt", r / "last.ckpt")))
    assert [f.code for f in seen.findings if f.severity > "info"] == ["dangling-pointer"]


DAMAGES: dict[str, tuple[str, Callable[[Path], object], set[str], str]] = {
    "cut in half": ("epochs", lambda r: damage.truncate(r / LAST, 0.5), {"truncated"}, "unsafe"),
    "one byte short": ("epochs", lambda r: damage.truncate(r / LAST, -1), {"truncated"}, "unsafe"),
    "empty": ("epochs", lambda r: damage.empty(r / LAST), {"empty-file"}, "unsafe"),
    "a bit flipped": ("epochs", lambda r: damage.flip(r / LAST, record="data/0"), {"crc-mismatch"}, "unsafe"),
    "all zeros": ("epochs", lambda r: damage.zero_fill(r / LAST), {"bad-header"}, "unsafe"),
    "an older one under its name": ("epochs", lambda r: shutil.copy2(r / "epoch=1-step=16.ckpt", r / LAST), {"step-mismatch"}, "lossy"),
    "loops of another save": (
        "epochs",
        lambda r: damage.resave(r / LAST, lambda s: _automatic(s)["optim_progress"]["optimizer"]["step"]["total"].update(completed=7)),
        {"step-mismatch"},
        "lossy",
    ),
    "fewer batches than steps": (
        "epochs",
        lambda r: damage.resave(r / LAST, lambda s: _batches(s).update(ready=9)),
        {"step-mismatch"},
        "lossy",
    ),
    "fewer batches completed than steps made": (
        "epochs",
        lambda r: damage.resave(r / LAST, lambda s: _batches(s).update(processed=10, completed=9)),
        {"step-mismatch"},
        "lossy",
    ),
    "the loops lost": ("epochs", lambda r: damage.resave(r / LAST, lambda s: s.pop("loops") and None), {"missing-trainer-state"}, "lossy"),
    "the schedule reset": ("plain", lambda r: damage.resave(r / LAST, lambda s: s["lr_schedulers"][0].update(_last_lr=[0.5])), {"lr-mismatch"}, "lossy"),
    "the scheduler lost": ("epochs", lambda r: damage.resave(r / LAST, lambda s: s.update(lr_schedulers=[])), {"missing-scheduler"}, "lossy"),
    "a sharded one without meta.pt": ("sharded", lambda r: damage.drop(r / LAST / "meta.pt"), {"incomplete-save"}, "unsafe"),
    "a sharded one without .metadata": ("sharded", lambda r: damage.drop(r / LAST / ".metadata"), {"incomplete-save"}, "unsafe"),
    "a shard cut": ("sharded", lambda r: damage.truncate(r / LAST / "__0_0.distcp", 0.5), {"out-of-bounds|truncated"}, "unsafe"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_named(runs: Path, look: Callable, damaged: Callable, what: str) -> None:
    name, how, expected, resume = DAMAGES[what]
    seen = look(damaged(runs / name, how))
    assert all(set(one.split("|")) & seen.codes(LAST) for one in expected), seen.loud
    assert seen.resume(LAST) == resume
    assert seen.codes("epoch=1-step=16.ckpt") == set()


def _batches(state: dict) -> dict:
    return state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]


def _automatic(state: dict) -> dict:
    fit = state["loops"]["fit_loop"]
    return {"optim_progress": fit["epoch_loop.automatic_optimization.optim_progress"]}


class TestContract(LayoutContract):
    name = "lightning"
    count = 3
    holds = frozenset({"model", "optimizer", "scheduler"})

    @pytest.fixture
    def sample(self, runs: Path) -> Path:
        return runs / "epochs"


class TestShardedContract(LayoutContract):
    name = "lightning"
    count = 3

    @pytest.fixture
    def sample(self, runs: Path) -> Path:
        return runs / "sharded"

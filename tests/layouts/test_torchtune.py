"""torchtune's directories: weights as Hugging Face writes them, with the recipe's own state beside or above."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptguard import testing_damage as damage
from ckptguard.testing_layouts import LayoutContract

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


def save(folder: Path, step: int, recipe: Path | None) -> None:
    """Weights, index and config; the recipe state, where there is one, comes last (_checkpointer.py)."""
    torch.manual_seed(step)
    net = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(step):
        net(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    folder.mkdir(parents=True)
    name = "model-00001-of-00001.safetensors"
    weights = dict(net.state_dict())
    safetensors.save_file(weights, folder / name)
    total = sum(w.nbytes for w in weights.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": dict.fromkeys(weights, name)})
    )
    if recipe is not None:
        recipe.parent.mkdir(exist_ok=True)
        state = {
            "seed": 1,
            "epochs_run": 1,
            "total_epochs": 2,
            "max_steps_per_epoch": None,
            "steps_run": step,
            "dataloader": {"_num_yielded": step},
        }
        torch.save({**state, "optimizer": optimizer.state_dict()}, recipe)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchtune")
    for step in (4, 8):
        save(folder / f"step_{step}", step, folder / f"step_{step}" / "recipe_state.pt")
    return folder


def test_intermediate_saves_are_exact(run: Path, look: Callable) -> None:
    seen = look(run)
    assert seen.loud == []
    assert [(v.layout, v.step, v.resume.value) for v in seen.verdicts.values()] == [
        ("torchtune", 4, "exact"),
        ("torchtune", 8, "exact"),
    ]


def test_one_recipe_state_for_the_run_belongs_to_the_newest_epoch(tmp_path: Path, look: Callable) -> None:
    save(tmp_path / "epoch_0", 3, None)
    save(tmp_path / "epoch_1", 6, tmp_path / "recipe_state" / "recipe_state.pt")
    seen = look(tmp_path)
    assert seen.loud == []
    assert {n: v.resume.value for n, v in seen.verdicts.items()} == {"epoch_0": "lossy", "epoch_1": "exact"}


def test_damage_is_named(run: Path, look: Callable, damaged: Callable) -> None:
    cut = look(damaged(run, lambda r: damage.truncate(r / "step_8/recipe_state.pt", 0.5)))
    assert "truncated" in cut.codes("step_8")


class TestContract(LayoutContract):
    name = "torchtune"
    count = 2

    @pytest.fixture
    def sample(self, run: Path) -> Path:
        return run

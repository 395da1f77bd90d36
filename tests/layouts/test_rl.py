"""verl and OpenRLHF: files of ranks, roles in folders of their own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptguard import testing_damage as damage
from ckptguard.testing_layouts import LayoutContract

pytestmark = pytest.mark.deepspeed
pytest.importorskip("deepspeed")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, write_runs: Callable[..., Path]) -> Path:
    return write_runs("rl_runs.py", tmp_path_factory.mktemp("rl"), ("verl", "openrlhf"), ranks=2)


@pytest.mark.parametrize("name", ["verl", "openrlhf"])
def test_a_healthy_run_is_exact_and_silent(runs: Path, look: Callable, name: str) -> None:
    seen = look(runs / name)
    assert seen.loud == []
    verdicts = [v for r in seen.reports for v in r.checkpoints]
    assert {(v.layout, v.resume.value) for v in verdicts} == {(name, "exact")}
    assert sorted(v.step for v in verdicts) == ([2, 4] if name == "verl" else [2, 2, 4, 4])


def shorten(path: Path) -> None:
    """One row less in a rank's part of a weight: what a save of another model would have."""

    def change(state: dict) -> None:
        weight = state["up.weight"]
        weight._local_tensor = weight._local_tensor[:-1].clone()

    damage.resave(path, change)


DAMAGES: dict[str, tuple[Callable[[Path], object], set[str], str]] = {
    "a rank's weights": (lambda c: damage.drop(c / "actor/model_world_size_2_rank_0.pt"), {"missing-rank"}, "unsafe"),
    "the last rank's optimizer": (lambda c: damage.drop(c / "critic/optim_world_size_2_rank_1.pt"), {"missing-rank"}, "unsafe"),
    "a rank's RNG": (lambda c: damage.drop(c / "actor/extra_state_world_size_2_rank_1.pt"), {"missing-rank"}, "lossy"),
    "a bit of a weight": (lambda c: damage.flip(c / "actor/model_world_size_2_rank_0.pt", record="data/0"), {"crc-mismatch"}, "unsafe"),
    "files of four ranks beside those of two": (
        lambda c: shutil.copy2(c / "actor/model_world_size_2_rank_0.pt", c / "actor/model_world_size_4_rank_0.pt"),
        {"mixed-saves", "missing-rank"},
        "unsafe",
    ),
    "weights of one rank twice": (lambda c: shutil.copy2(c / "actor/model_world_size_2_rank_0.pt", c / "actor/model_world_size_2_rank_1.pt"), {"shape-mismatch", "topology-mismatch"}, "unsafe"),
    "one rank's optimizer twice": (lambda c: shutil.copy2(c / "actor/optim_world_size_2_rank_0.pt", c / "actor/optim_world_size_2_rank_1.pt"), {"missing-rank", "shape-mismatch"}, "unsafe"),
    "optimizers that changed places": (lambda c: damage.swap(c / "actor/optim_world_size_2_rank_0.pt", c / "actor/optim_world_size_2_rank_1.pt"), {"shape-mismatch"}, "unsafe"),
    "weights that changed places": (lambda c: damage.swap(c / "actor/model_world_size_2_rank_0.pt", c / "actor/model_world_size_2_rank_1.pt"), {"topology-mismatch"}, "unsafe"),
    "a rank's weights of an older save": (
        lambda c: shutil.copy2(c.parent / "global_step_2/actor/model_world_size_2_rank_1.pt", c / "actor/model_world_size_2_rank_1.pt"),
        {"mixed-saves"},
        "unsafe",
    ),
    "the optimizer of an older save": (
        lambda c: shutil.copy2(c.parent / "global_step_2/actor/optim_world_size_2_rank_1.pt", c / "actor/optim_world_size_2_rank_1.pt"),
        {"rank-divergence"},
        "unsafe",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_what_is_lost_or_wrong_in_verl_is_named(
    runs: Path, look: Callable, damaged: Callable, what: str
) -> None:
    how, expected, resume = DAMAGES[what]
    seen = look(damaged(runs / "verl", lambda run: how(run / "global_step_4")))
    assert expected <= seen.codes("global_step_4"), seen.loud
    assert seen.resume("global_step_4") == resume
    assert seen.codes("global_step_2") == set()


def test_pointers_of_verl_and_of_each_role_of_openrlhf_are_followed(
    runs: Path, look: Callable, damaged: Callable
) -> None:
    verl = look(damaged(runs / "verl", lambda r: (r / "latest_checkpointed_iteration.txt").write_text("6")))
    assert "dangling-pointer" in {f.code for f in verl.findings}
    other = look(damaged(runs / "openrlhf", lambda r: (r / "_critic/latest").write_text("global_step9")))
    assert "dangling-pointer" in {f.code for f in other.findings}


class TestVerlContract(LayoutContract):
    name = "verl"
    count = 2
    holds = frozenset({"model", "optimizer", "scheduler", "rng", "dataloader"})

    @pytest.fixture
    def sample(self, runs: Path) -> Path:
        return runs / "verl"


class TestOpenRlhfContract(LayoutContract):
    name = "openrlhf"
    count = 4

    @pytest.fixture
    def sample(self, runs: Path) -> Path:
        return runs / "openrlhf"

"""The Trainer's checkpoints of two ranks, with DeepSpeed or FSDP inside."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptguard import testing_damage as damage
from ckptguard.testing_layouts import LayoutContract

pytestmark = [pytest.mark.hf, pytest.mark.deepspeed]
pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

RUNS = ("two-ranks", "fsdp", "zero2", "zero3")
LAST = "checkpoint-6"
OPTIM = "global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, write_runs: Callable[..., Path]) -> Path:
    return write_runs("trainer_runs.py", tmp_path_factory.mktemp("trainer"), RUNS, ranks=2)


@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_run_is_exact_and_silent(runs: Path, look: Callable, name: str) -> None:
    seen = look(runs / name)
    assert seen.loud == []
    assert {n: v.resume.value for n, v in seen.verdicts.items()} == {"checkpoint-3": "exact", LAST: "exact"}


DAMAGES: dict[str, tuple[str, Callable[[Path], object], set[str], str]] = {
    "a rank's RNG": ("two-ranks", lambda c: damage.drop(c / "rng_state_0.pth"), {"missing-rank"}, "lossy"),
    "the last rank's RNG": ("zero2", lambda c: damage.drop(c / "rng_state_1.pth"), {"missing-rank"}, "lossy"),
    "a partition": ("zero2", lambda c: damage.drop(c / OPTIM), {"missing-rank"}, "unsafe"),
    "an older partition": ("zero2", lambda c: shutil.copy2(c.parent / "checkpoint-3/global_step3" / Path(OPTIM).name, c / OPTIM), {"rank-divergence"}, "unsafe"),
    "the pointer": ("zero3", lambda c: damage.drop(c / "latest"), {"missing-file"}, "unsafe"),
    "the pointer names another tag": ("zero3", lambda c: (c / "latest").write_text("global_step3"), {"missing-file"}, "unsafe"),
    "the tag": ("zero3", lambda c: damage.drop(c / "global_step6"), {"missing-model", "missing-optimizer"}, "unsafe"),
    "the sharded model's metadata": ("fsdp", lambda c: damage.drop(c / "pytorch_model_fsdp_0/.metadata"), {"incomplete-save"}, "unsafe"),
    "a shard of the model": ("fsdp", lambda c: damage.drop(c / "pytorch_model_fsdp_0/__1_0.distcp"), {"missing-file"}, "unsafe"),
    "the sharded optimizer": ("fsdp", lambda c: damage.drop(c / "optimizer_0"), {"missing-optimizer"}, "lossy"),
    "a bit of the sharded optimizer": ("fsdp", lambda c: damage.flip(c / "optimizer_0/__0_0.distcp"), {"crc-mismatch"}, "unsafe"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_what_is_lost_or_wrong_is_named(runs: Path, look: Callable, damaged: Callable, what: str) -> None:
    name, how, expected, resume = DAMAGES[what]
    seen = look(damaged(runs / name, lambda run: how(run / LAST)))
    assert expected <= seen.codes(LAST), seen.loud
    assert seen.resume(LAST) == resume


class TestContract(LayoutContract):
    name = "hf-trainer"
    count = 2
    holds = frozenset({"model", "optimizer", "scheduler", "rng", "config"})

    @pytest.fixture
    def sample(self, runs: Path) -> Path:
        return runs / "zero3"

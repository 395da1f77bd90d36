"""accelerate's `save_state`, two ranks on CPU: silence on healthy runs, the right words on damaged ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptguard import testing_damage as damage
from ckptguard.testing_layouts import LayoutContract

pytestmark = pytest.mark.hf
pytest.importorskip("accelerate")

HEALTHY = ("two-ranks", "no-scheduler", "sgd", "bf16-loader", "two-models", "fsdp2")
DEEPSPEED = ("zero2", "zero3")
LAST = "checkpoint_2"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, write_runs: Callable[..., Path]) -> Path:
    return write_runs("accelerate_runs.py", tmp_path_factory.mktemp("accelerate"), HEALTHY, ranks=2)


@pytest.fixture(scope="session")
def deepspeed_runs(tmp_path_factory: pytest.TempPathFactory, write_runs: Callable[..., Path]) -> Path:
    pytest.importorskip("deepspeed")
    return write_runs("accelerate_runs.py", tmp_path_factory.mktemp("accelerate-zero"), DEEPSPEED, ranks=2)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_exact_and_silent(runs: Path, look: Callable, name: str) -> None:
    seen = look(runs / name)
    assert seen.loud == []
    assert [v.resume.value for v in seen.verdicts.values()] == ["exact"] * 3


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_inside_is_exact_and_silent(deepspeed_runs: Path, look: Callable, name: str) -> None:
    seen = look(deepspeed_runs / name)
    assert seen.loud == []
    assert [v.resume.value for v in seen.verdicts.values()] == ["exact"] * 3


def test_the_step_is_the_optimizers_and_not_the_number_of_the_save(runs: Path, look: Callable) -> None:
    assert [v.step for v in look(runs / "two-ranks").verdicts.values()] == [2, 4, 6]


def last(run: Path) -> Path:
    return run / "checkpoints" / LAST


def older(run: Path) -> Path:
    return run / "checkpoints" / "checkpoint_1"


DAMAGES: dict[str, tuple[str, Callable[[Path], object], set[str], str]] = {
    "the weights are lost": ("two-ranks", lambda r: damage.drop(last(r) / "model.safetensors"), {"missing-model"}, "unsafe"),
    "the optimizer is lost": ("two-ranks", lambda r: damage.drop(last(r) / "optimizer.bin"), {"missing-optimizer"}, "lossy"),
    "the scheduler is lost": ("two-ranks", lambda r: damage.drop(last(r) / "scheduler.bin"), {"missing-scheduler"}, "lossy"),
    "rank 0's RNG is lost": ("two-ranks", lambda r: damage.drop(last(r) / "random_states_0.pkl"), {"missing-rank"}, "lossy"),
    "every RNG is lost": ("two-ranks", lambda r: [damage.drop(p) for p in last(r).glob("random_states_*")], {"incomplete-save"}, "unsafe"),
    "an older scheduler": ("two-ranks", lambda r: shutil.copy2(older(r) / "scheduler.bin", last(r) / "scheduler.bin"), {"lr-mismatch"}, "lossy"),
    "an older optimizer": ("two-ranks", lambda r: shutil.copy2(older(r) / "optimizer.bin", last(r) / "optimizer.bin"), {"step-mismatch"}, "lossy"),
    "an empty scheduler": ("two-ranks", lambda r: damage.empty(last(r) / "scheduler.bin"), {"empty-file"}, "unsafe"),
    "a cut RNG": ("two-ranks", lambda r: damage.truncate(last(r) / "random_states_1.pkl", 0.5), {"truncated"}, "unsafe"),
    "a sharded model without its metadata": (
        "fsdp2", lambda r: damage.drop(last(r) / "pytorch_model_fsdp_0/.metadata"), {"incomplete-save", "missing-model"}, "unsafe"
    ),
    "a shard of the optimizer lost": ("fsdp2", lambda r: damage.drop(last(r) / "optimizer_0/__1_0.distcp"), {"missing-file"}, "unsafe"),
    "the last rank's RNG of a sharded save": ("fsdp2", lambda r: damage.drop(last(r) / "random_states_1.pkl"), {"missing-rank"}, "lossy"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_named(runs: Path, look: Callable, damaged: Callable, what: str) -> None:
    name, how, expected, resume = DAMAGES[what]
    seen = look(damaged(runs / name, how))
    assert expected <= seen.codes(LAST), seen.loud
    assert seen.resume(LAST) == resume
    assert seen.codes("checkpoint_1") == set()


class TestContract(LayoutContract):
    name = "accelerate"
    count = 3
    holds = frozenset({"model", "optimizer", "scheduler", "rng"})

    @pytest.fixture
    def sample(self, runs: Path) -> Path:
        return runs / "fsdp2"


def _loop(run: Path, begin: int = 0, lora: bool = False) -> None:
    """Two prepared networks, of which the second is trained from step `begin` on; a save every second step."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    nets = [torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)]
    made = [(n, torch.optim.AdamW(n.parameters(), lr=1e-2)) for n in nets]
    pairs = [accelerator.prepare(*pair) for pair in made]
    for step in range(1, 7):
        for net, optimizer in pairs if step > begin else pairs[:1]:
            optimizer.zero_grad()
            accelerator.backward(net(torch.randn(4, 6)).square().mean())
            optimizer.step()
        if step % 2 == 0:
            folder = run / f"checkpoint-{step}"
            accelerator.save_state(str(folder))
            if lora:
                (folder / "model.safetensors").rename(folder / "pytorch_lora_weights.safetensors")
                (folder / "model_1.safetensors").unlink()


@pytest.mark.hf
@pytest.mark.parametrize("options", [{"begin": 3}, {"lora": True}], ids=str)
def test_networks_that_begin_late_and_weights_of_other_names(options: Any, tmp_path: Path) -> None:
    """A discriminator is often trained from some step on; diffusers' LoRA scripts save their weights by a hook."""
    from ckptguard.inspect import Options, audit
    from ckptguard.model import Resume

    pytest.importorskip("accelerate")
    _loop(tmp_path, **options)
    (report,) = audit(str(tmp_path), Options(grace=0.0))
    assert not [f.message for v in report.checkpoints for f in v.findings if f.loud]
    assert [v.resume for v in report.checkpoints] == [Resume.EXACT] * 3

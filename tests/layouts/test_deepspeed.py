"""DeepSpeed's own checkpoints, two ranks on CPU: silence on healthy runs, the right words on damaged ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptguard import testing_damage as damage
from ckptguard.testing_layouts import LayoutContract

pytestmark = pytest.mark.deepspeed
pytest.importorskip("deepspeed")

HEALTHY = (
    "zero1-fp16",
    "zero2-resumed",
    "zero3-bf16",
    "zero2-epoch",
    "zero2-frozen",
    "universal",
    "experts",
    "lightning",
    "pipeline",  # the last: its process groups stay
)
MORE = (
    "zero0-fp32",
    "zero0-bf16",
    "zero1-bf16",
    "zero2-fp32-groups",
    "zero2-tied",
    "zero2-warmup",
    "zero3-frozen",
    "zero3-fp16",
)
OPTIM_1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, write_runs: Callable[..., Path]) -> Path:
    return write_runs("deepspeed_runs.py", tmp_path_factory.mktemp("deepspeed"), HEALTHY, ranks=2)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_exact_and_silent(runs: Path, look: Callable, name: str) -> None:
    seen = look(runs / name)
    assert seen.loud == []
    assert {v.resume.value for v in seen.verdicts.values()} == {"exact"}
    assert all(v.coverage.bytes_proven for v in seen.verdicts.values())


@pytest.mark.soak
def test_more_healthy_runs_are_silent(
    tmp_path: Path, write_runs: Callable[..., Path], look: Callable
) -> None:
    out = write_runs("deepspeed_runs.py", tmp_path, MORE, ranks=2, timeout=600)
    assert {name: look(out / name).loud for name in MORE} == {name: [] for name in MORE}


def newest(run: Path) -> Path:
    tag = (run / "latest").read_text()
    return run / tag


def shift_global_samples(path: Path) -> None:
    damage.resave(path, lambda s: s.update(global_samples=s["global_samples"] // 2))


def add_rank_2(tag: Path) -> None:
    for file in list(tag.glob("*rank_1_*")):
        shutil.copy2(file, tag / file.name.replace("rank_1_", "rank_2_"))


def partition(run: Path, rank: int = 1) -> Path:
    return newest(run) / OPTIM_1.replace("rank_1", f"rank_{rank}")


def change_state(run: Path, change: Callable[[dict], object], rank: int = 1) -> None:
    """Change a stage-3 partition: its masters and the states of its groups."""
    damage.resave(partition(run, rank), lambda s: change(s["optimizer_state_dict"]) and None)


def from_older(key: str, run: Path) -> None:
    """The masters, or the moments, of rank 1 as they were in the save before, the steps counted on."""
    old = _load(run / "global_step4" / OPTIM_1)["optimizer_state_dict"]

    def change(state: dict) -> None:
        if key == "masters":
            state["fp32_flat_groups"] = old["fp32_flat_groups"]
            return
        for mine, theirs in zip(_states(state), _states(old)):
            mine.update(exp_avg=theirs["exp_avg"], exp_avg_sq=theirs["exp_avg_sq"])

    change_state(run, change)


def other_numbers(state: dict) -> None:
    """Masters of another training: of the same size, and nowhere near."""
    for flat in state["fp32_flat_groups"]:
        flat.data += flat.data.flip(0).sign()


DAMAGES: dict[str, tuple[str, Callable[[Path], object], set[str]]] = {
    "partitions that changed places": ("zero3-bf16", lambda r: damage.swap(partition(r, 0), partition(r, 1)), {"topology-mismatch"}),
    "one partition under two names": ("zero3-bf16", lambda r: shutil.copy2(partition(r, 0), partition(r, 1)), {"missing-rank"}),
    "a rank's masters of an older save": ("zero3-bf16", lambda r: from_older("masters", r), {"mixed-saves"}),
    "a rank's moments of an older save": ("zero3-bf16", lambda r: from_older("moments", r), {"mixed-saves"}),
    "a rank's masters of another training": ("zero3-bf16", lambda r: change_state(r, other_numbers), {"mixed-saves"}),
    "a rank's masters never filled": ("zero3-bf16", lambda r: change_state(r, lambda s: [f.data.zero_() for f in s["fp32_flat_groups"]]), {"zero-weights"}),
    "a rank's second moments zeroed": ("zero3-bf16", lambda r: change_state(r, lambda s: [v["exp_avg_sq"].zero_() for v in _states(s)]), {"invalid-optimizer"}),
    "a rank's second moments lost": ("zero3-bf16", lambda r: change_state(r, lambda s: [v.pop("exp_avg_sq") for v in _states(s)]), {"missing-tensor"}),
    "a rank's partition is lost": ("zero3-bf16", lambda r: damage.drop(newest(r) / OPTIM_1), {"missing-rank"}),
    "a rank's stage-3 model file is lost": ("zero3-bf16", lambda r: damage.drop(newest(r) / "zero_pp_rank_1_mp_rank_00_model_states.pt"), {"missing-rank"}),
    "the model states are lost": ("zero2-epoch", lambda r: damage.drop(newest(r) / "mp_rank_00_model_states.pt"), {"missing-rank", "missing-model"}),
    "a partition of an older save": ("zero2-epoch", lambda r: shutil.copy2(r / "global_step4" / OPTIM_1, r / "global_step8" / OPTIM_1), {"rank-divergence", "mixed-saves"}),
    "weights of an older save": (
        "zero2-epoch",
        lambda r: damage.resave(
            r / "global_step8/mp_rank_00_model_states.pt", lambda s: s["module"].update(_load(r / "global_step4/mp_rank_00_model_states.pt")["module"])
        ),
        {"mixed-saves"},
    ),
    "a partition cut in half": ("zero2-epoch", lambda r: damage.truncate(newest(r) / OPTIM_1, 0.5), {"truncated"}),
    "an empty partition": ("zero2-epoch", lambda r: damage.empty(newest(r) / OPTIM_1), {"empty-file"}),
    "a bit flipped in a partition": ("zero3-bf16", lambda r: damage.flip(newest(r) / OPTIM_1, record="data/0"), {"crc-mismatch"}),
    "half the samples": ("zero2-epoch", lambda r: shift_global_samples(newest(r) / "mp_rank_00_model_states.pt"), {"data-position-mismatch"}),
    "masters one element short": (
        "zero3-bf16",
        lambda r: damage.resave(newest(r) / OPTIM_1, lambda s: _shorten(s["optimizer_state_dict"]["fp32_flat_groups"])),
        {"shape-mismatch"},
    ),
    "partitions of two ranks lost at stage 2": (
        "zero2-epoch",
        lambda r: [damage.drop(p) for p in newest(r).glob("*optim_states.pt")],
        {"missing-optimizer"},
    ),
    "a stale file of a larger run": ("zero3-bf16", lambda r: add_rank_2(newest(r)), {"missing-rank"}),
    "files of two precisions": ("zero2-epoch", lambda r: shutil.copy2(newest(r) / OPTIM_1, newest(r) / OPTIM_1.removeprefix("bf16_")), {"mixed-saves"}),
    "a layer of a pipeline lost": ("pipeline", lambda r: damage.drop(newest(r) / "layer_02-model_states.pt"), {"missing-file"}),
    "an expert lost": ("experts", lambda r: damage.drop(newest(r) / "layer_0_expert_2_mp_rank_00_model_states.pt"), {"missing-rank"}),
    "a converted parameter lost": ("universal", lambda r: damage.drop(r / "global_step4_universal/zero/up.weight"), {"missing-tensor"}),
    "a converted moment lost": ("universal", lambda r: damage.drop(r / "global_step4_universal/zero/up.weight/exp_avg.pt"), {"missing-file"}),
}  # fmt: skip
HARMLESS = {"a stale file of a larger run"}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_named(runs: Path, look: Callable, damaged: Callable, what: str) -> None:
    name, how, expected = DAMAGES[what]
    run = damaged(runs / name, how)
    last = "global_step4_universal" if name == "universal" else newest(run).name
    seen = look(run)
    assert expected <= seen.codes(last), seen.loud
    assert (seen.resume(last) == "exact") == (what in HARMLESS)


def test_a_pointer_that_names_nothing(runs: Path, look: Callable, damaged: Callable) -> None:
    seen = look(damaged(runs / "zero2-epoch", lambda r: (r / "latest").write_text("global_step99")))
    assert "dangling-pointer" in {f.code for f in seen.findings}


def _load(path: Path) -> dict:
    import torch

    return torch.load(path, weights_only=False)


def _states(inner: dict) -> list[dict]:
    return list(inner["optimizer_state_dict"]["state"].values())


def _shorten(groups: list) -> None:
    groups[-1] = groups[-1][:-1].clone()


def test_padding_that_was_never_filled_may_hold_anything(
    runs: Path, look: Callable, damaged: Callable
) -> None:
    """Of up.bias (11 numbers on two ranks) the last rank has five and room for six."""

    def fill(place: int) -> Callable[[Path], object]:
        def change(state: dict) -> None:
            state["fp32_flat_groups"][-1].data[place] = float("nan")

        return lambda run: change_state(run, change)

    empty = _room(runs / "zero3-bf16")
    assert look(damaged(runs / "zero3-bf16", fill(empty))).loud == []


def _room(run: Path) -> int:
    """Where the last group of rank 1 has room for the twelfth of eleven numbers."""
    groups = _load(newest(run) / "zero_pp_rank_0_mp_rank_00_model_states.pt")["param_shapes"]
    before = 0
    for name, shape in groups[-1].items():
        if name == "up.bias":
            return before + shape.numel() // 2
        before += (shape.numel() + 1) // 2
    raise AssertionError("up.bias is in another group")


def test_a_conversion_does_not_go_before_the_save_that_it_was_made_of(runs: Path, look: Callable) -> None:
    (report,) = look(runs / "universal").reports
    assert report.resume_from is not None and report.resume_from.endswith("/global_step4")


def test_a_parameter_that_a_script_sets_itself_is_no_mixture(
    runs: Path, look: Callable, damaged: Callable
) -> None:
    def set_bias(state: dict) -> None:
        state["module"]["norm.bias"].fill_(0.5)

    def clamp(run: Path) -> None:
        damage.resave(run / "global_step8/mp_rank_00_model_states.pt", set_bias)

    seen = look(damaged(runs / "zero2-epoch", clamp))
    assert seen.loud == []
    assert any(f.code == "mixed-saves" and "norm.bias" in f.message for f in seen.findings)


def test_lightnings_folder_around_it_is_one_checkpoint(runs: Path, look: Callable, damaged: Callable) -> None:
    name = "epoch=0-step=8.ckpt"
    seen = look(runs / "lightning")
    assert [(v.layout, v.step) for v in seen.verdicts.values()] == [("lightning", 4), ("lightning", 8)]
    broken = look(damaged(runs / "lightning", lambda r: damage.drop(r / name / "checkpoint" / OPTIM_1)))
    assert "missing-rank" in broken.codes(name)
    assert broken.resume("epoch=0-step=4.ckpt") == "exact"


class TestContract(LayoutContract):
    name = "deepspeed"
    count = 2
    holds = frozenset({"model", "optimizer", "scheduler"})

    @pytest.fixture
    def sample(self, runs: Path) -> Path:
        return runs / "zero3-bf16"


class TestUniversalContract(LayoutContract):
    name = "deepspeed"
    count = 2

    @pytest.fixture
    def sample(self, runs: Path) -> Path:
        return runs / "universal"

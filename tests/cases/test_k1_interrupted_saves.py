"""K1: saves that were interrupted, the order in which things are written, and what is found as the latest."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ckptguard.testing_cases import Case, at, each
from ckptguard.testing_damage import drop, edit_json, empty, truncate

Holds = Callable[[Case, Path], list[str]]


def killed(folder: str, order: Iterable[str], written: int) -> Callable[[Path], None]:
    """A save that ended after so many of the files, in the order in which they are written."""

    def make(run: Path) -> None:
        for name in list(order)[written:]:
            for path in (run / folder).glob(name):
                drop(path)

    return make


TRAINER_ORDER = (
    "config.json", "generation_config.json", "model.safetensors", "training_args.bin",
    "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
)  # fmt: skip
ACCELERATE_ORDER = (
    "model.safetensors",
    "optimizer.bin",
    "scheduler.bin",
    "sampler.bin",
    "random_states_0.pkl",
)


def staged(run: Path) -> None:
    """What transformers 4.36 left: the staging folder of a save that another process renamed too late."""
    shutil.copytree(run / "checkpoint-20", run / "tmp-checkpoint-30")
    shutil.rmtree(run / "checkpoint-30")
    edit_json(run / "tmp-checkpoint-30/trainer_state.json", lambda s: s.update(global_step=30))


def staged_half(run: Path) -> None:
    staged(run)
    for path in (run / "tmp-checkpoint-30").iterdir():
        if path.name != "model.safetensors":
            drop(path)


def staged_beside(run: Path) -> None:
    shutil.copytree(run / "checkpoint-30", run / "tmp-checkpoint-30")


PARTIAL = {"checkpoint-30": "unsafe missing-trainer-state missing-optimizer? missing-scheduler? missing-rng? missing-model? missing-config?"}  # fmt: skip

TRAINER = [
    Case("healthy", each(), {}, "checkpoint-30"),
    *(
        Case(f"B01 killed after {n} of 8 files", killed("checkpoint-30", TRAINER_ORDER, n), PARTIAL, "checkpoint-20")
        for n in range(1, 8)
    ),
    Case(
        "B01 killed after the folder was made",
        killed("checkpoint-30", TRAINER_ORDER, 0),
        {"checkpoint-30": "unsafe incomplete-save missing-model? missing-trainer-state?"},
        "checkpoint-20",
    ),
    Case(
        "B01 the first save was killed",
        each(killed("checkpoint-10", TRAINER_ORDER, 3), at("checkpoint-20", drop), at("checkpoint-30", drop)),
        {"checkpoint-10": PARTIAL["checkpoint-30"]},
        None,
        run="no-safe-checkpoint",
    ),
    Case(
        "B01 two kills at different steps",
        each(killed("checkpoint-30", TRAINER_ORDER, 7), killed("checkpoint-20", TRAINER_ORDER, 7)),
        {"checkpoint-30": PARTIAL["checkpoint-30"], "checkpoint-20": PARTIAL["checkpoint-30"]},
        "checkpoint-10",
    ),
    Case(
        "B01 a rotation cut short is no killed save",
        killed("checkpoint-10", reversed(TRAINER_ORDER), 4),
        {"checkpoint-10": "-"},
        "checkpoint-30",
    ),
    Case("B09 only the staging folder, whole", staged, {"tmp-checkpoint-30": "unsafe incomplete-save step-mismatch? duplicate-checkpoint? frozen-weights? lr-mismatch?"}, "checkpoint-20"),
    Case("B09 only the staging folder, half", staged_half, {"tmp-checkpoint-30": "unsafe incomplete-save missing-trainer-state? missing-optimizer? missing-scheduler? missing-rng? missing-config? frozen-weights?"}, "checkpoint-20"),
    Case("B09 staging folder beside the final one", staged_beside, {"tmp-checkpoint-30": "-"}, "checkpoint-30"),
    Case(
        "B10 best checkpoint of another host",
        at("checkpoint-30/trainer_state.json", edit_json, lambda s: s.update(best_model_checkpoint="/data/run7/checkpoint-900", best_metric=1.0)),
        {},
        "checkpoint-30",
        run="dangling-pointer?",
    ),
    Case("B32 short model, no optimizer", each(at("checkpoint-30/optimizer.pt", drop), at("checkpoint-30/model.safetensors", truncate, 0.7)), {"checkpoint-30": "unsafe truncated@model missing-optimizer"}, "checkpoint-20"),
]  # fmt: skip

DCP = [
    Case("healthy", each(), {}, "step-30"),
    Case("B02 no .metadata", at("step-30/.metadata", drop), {"step-30": "unsafe incomplete-save missing-model? missing-optimizer? missing-scheduler? missing-rng?"}, "step-20"),
    Case(
        "B02 .metadata of zero bytes",
        at("step-30/.metadata", empty),
        {"step-30": "unsafe empty-file@.metadata"},
        "step-20",
    ),
    Case(
        "B02 .metadata names a shard that is gone",
        at("step-30/__0_0.distcp", drop),
        {"step-30": "unsafe missing-file|missing-rank@__0_0.distcp"},
        "step-20",
    ),
    Case(
        "B02 a short shard", at("step-30/__0_0.distcp", truncate, 0.5), {"step-30": "unsafe out-of-bounds|truncated@__0_0.distcp missing-tensor?"}, "step-20"
    ),
    Case(
        "B12 an empty step folder",
        each(at("step-30/.metadata", drop), at("step-30/__0_0.distcp", drop)),
        {"step-30": "unsafe incomplete-save missing-model?"},
        "step-20",
    ),
]  # fmt: skip

ACCELERATE = [
    Case("healthy", each(), {}, "checkpoint_2"),
    *(
        Case(
            f"killed after {n} of 4 files",
            killed("checkpoints/checkpoint_2", ACCELERATE_ORDER, n),
            {"checkpoint_2": "unsafe|lossy incomplete-save|missing-rng missing-optimizer? missing-scheduler? missing-rng? missing-model?"},
            "checkpoint_1",
        )
        for n in (1, 2, 4)
    ),
]  # fmt: skip

LIGHTNING = [
    Case("healthy", each(), {}, "epoch=2-step=30.ckpt"),
    Case("B03 cut to 60 %", at("epoch=2-step=30.ckpt", truncate, 0.6), {"epoch=2-step=30.ckpt": "unsafe truncated|bad-header"}, "epoch=1-step=20.ckpt"),
    Case("B03 nothing written", at("epoch=2-step=30.ckpt", empty), {"epoch=2-step=30.ckpt": "unsafe empty-file"}, "epoch=1-step=20.ckpt"),
]  # fmt: skip


@pytest.mark.parametrize("case", TRAINER, ids=str)
def test_trainer(case: Case, holds: Holds, trainer_run: Path) -> None:
    assert holds(case, trainer_run) == []


@pytest.mark.parametrize("case", DCP, ids=str)
def test_dcp(case: Case, holds: Holds, dcp_run: Path) -> None:
    assert holds(case, dcp_run) == []


@pytest.mark.parametrize("case", ACCELERATE, ids=str)
def test_accelerate(case: Case, holds: Holds, accelerate_run: Path) -> None:
    assert holds(case, accelerate_run) == []


@pytest.mark.parametrize("case", LIGHTNING, ids=str)
def test_lightning(case: Case, holds: Holds, lightning_run: Path) -> None:
    assert holds(case, lightning_run) == []

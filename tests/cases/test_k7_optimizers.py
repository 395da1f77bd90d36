"""K7: optimizer state: absent, empty, stale, of other shapes and types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptguard.testing_cases import Case, at, copied, each
from ckptguard.testing_damage import drop, resave

Holds = Callable[[Case, Path], list[str]]
Change = Callable[[dict[str, Any]], Any]
EVERY = ("checkpoint-10", "checkpoint-20", "checkpoint-30")


def optimizer(change: Change) -> Change:
    """Change the optimizer in a plain loop's file."""
    return lambda state: change(state["optimizer"]) and None


def moments(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def make(state: dict[str, Any]) -> None:
        for values in state["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                values[key] = change(values[key])

    return make


def steps(change: Callable[[int, Any], Any]) -> Change:
    def make(state: dict[str, Any]) -> None:
        for place, values in state["state"].items():
            values["step"] = change(place, values["step"])

    return make


def no_state(state: dict[str, Any]) -> None:
    state["state"] = {}


def low_bits_gone(t: torch.Tensor) -> torch.Tensor:
    return t.bfloat16().float()


def flat(parts: int) -> Change:
    return moments(lambda t: t.flatten()[: max(1, t.numel() // parts)].clone())


def one_flat(state: dict[str, Any]) -> None:
    """FSDP1: one flat state for all parameters, of one rank's share."""
    total = sum(v["exp_avg"].numel() for v in state["state"].values()) // 8
    state["state"] = {
        0: {"step": torch.tensor(30.0), "exp_avg": torch.zeros(total), "exp_avg_sq": torch.ones(total)}
    }
    state["param_groups"] = [{**state["param_groups"][0], "params": [0]}]


def swapped(state: dict[str, Any]) -> None:
    """The states of two parameters of one shape, exchanged: nothing in the file can tell."""
    held = state["state"]
    pairs = [
        (a, b) for a in held for b in held if a < b and held[a]["exp_avg"].shape == held[b]["exp_avg"].shape
    ]
    a, b = pairs[0]
    held[a], held[b] = held[b], held[a]


def reversed_order(state: dict[str, Any]) -> None:
    held = state["state"]
    keys = list(held)
    state["state"] = {k: held[o] for k, o in zip(keys, reversed(keys))}


def bnb(state: dict[str, Any]) -> None:
    for values in state["state"].values():
        size = values.pop("exp_avg").numel()
        values.pop("exp_avg_sq")
        values |= {
            "step": 30, "state1": torch.randint(255, (size,), dtype=torch.uint8), "state2": torch.randint(255, (size,), dtype=torch.uint8),
            "absmax1": torch.rand(-(-size // 256)), "absmax2": torch.rand(-(-size // 256)), "qmap1": torch.linspace(-1, 1, 256), "qmap2": torch.linspace(0, 1, 256),
        }  # fmt: skip


def half_ahead(state: dict[str, Any]) -> None:
    """A snapshot torn by a step that was made while it was written."""
    for place, values in state["state"].items():
        values["step"] = values["step"] + (place % 2)


def late_unfrozen(state: dict[str, Any]) -> None:
    for place, values in state["state"].items():
        if place < 3:
            values["step"] = values["step"] - 5


def without(*names: str) -> Callable[[Path], None]:
    def drop_all(folder: Path) -> None:
        for name in names:
            drop(folder / name)

    return drop_all


MODEL_ONLY = without("optimizer.pt", "scheduler.pt", "rng_state.pth")

TRAINER = [
    Case("B77 model only throughout [TRAP]", at("checkpoint-*", MODEL_ONLY), dict.fromkeys(EVERY, "lossy missing-optimizer"), "checkpoint-30"),
    Case("B77 only the newest lacks it", at("checkpoint-30", MODEL_ONLY), {"checkpoint-30": "lossy missing-optimizer missing-scheduler missing-rng"}, "checkpoint-20", safe="checkpoint-30"),
    Case("B77 only the first has it", each(at("checkpoint-20", MODEL_ONLY), at("checkpoint-30", MODEL_ONLY)), dict.fromkeys(EVERY[1:], "lossy missing-optimizer missing-scheduler missing-rng"), "checkpoint-10", safe="checkpoint-30"),
    Case("no optimizer in any, but a scheduler", at("checkpoint-*", without("optimizer.pt")), dict.fromkeys(EVERY, "lossy missing-optimizer"), "checkpoint-30"),
    Case("B79 empty state throughout", at("checkpoint-*/optimizer.pt", resave, no_state), dict.fromkeys(EVERY, "unsafe invalid-optimizer"), None, run="no-safe-checkpoint"),
    Case("B82 the counter starts again", at("checkpoint-30/optimizer.pt", resave, steps(lambda i, s: s * 0)), {"checkpoint-30": "lossy|unsafe step-mismatch@optimizer.pt"}, "checkpoint-20", safe="checkpoint-30"),
    Case("B82 the counter starts again at every save", at("checkpoint-*/optimizer.pt", resave, steps(lambda i, s: s * 0 + 1)), dict.fromkeys(EVERY, "lossy|unsafe step-mismatch@optimizer.pt"), None, safe="checkpoint-30"),
    Case("B89 moments whose low bits are gone [TRAP]", at("checkpoint-30/optimizer.pt", resave, moments(low_bits_gone)), {}, "checkpoint-30"),
    Case("B88 moments in bf16 throughout [TRAP]", at("checkpoint-*/optimizer.pt", resave, moments(lambda t: t.bfloat16())), {}, "checkpoint-30"),
    Case("B89 moments in bf16 before, in fp32 now", each(*(at(f"{c}/optimizer.pt", resave, moments(lambda t: t.bfloat16())) for c in EVERY[:2])), {"checkpoint-30": "exact|lossy dtype-mismatch?"}, "checkpoint-30|checkpoint-20", safe="checkpoint-30"),
    Case("B96 steps as whole numbers [TRAP]", at("checkpoint-*/optimizer.pt", resave, steps(lambda i, s: int(s))), {}, "checkpoint-30"),
    Case("B96 steps as integer tensors [TRAP]", at("checkpoint-30/optimizer.pt", resave, steps(lambda i, s: s.long())), {}, "checkpoint-30"),
    Case("B97 moments of one rank of eight, flat", at("checkpoint-30/optimizer.pt", resave, flat(8)), {"checkpoint-30": "unsafe shape-mismatch@optimizer.pt"}, "checkpoint-20"),
    Case("B97 flat moments throughout", at("checkpoint-*/optimizer.pt", resave, flat(8)), dict.fromkeys(EVERY, "unsafe shape-mismatch@optimizer.pt"), None, run="no-safe-checkpoint"),
    Case("B52 one flat state for all", at("checkpoint-30/optimizer.pt", resave, one_flat), {"checkpoint-30": "unsafe shape-mismatch@optimizer.pt"}, "checkpoint-20"),
    Case("B92 a quantised optimizer [TRAP]", at("checkpoint-*/optimizer.pt", resave, bnb), {f"checkpoint-{n}": "exact|lossy step-mismatch?" for n in (10, 20)}, "checkpoint-30"),
    Case("B153 a torn snapshot", at("checkpoint-30/optimizer.pt", resave, half_ahead), {"checkpoint-30": "unsafe mixed-saves@optimizer.pt step-mismatch?"}, "checkpoint-20"),
    Case("parameters that were unfrozen late [TRAP]", at("checkpoint-*/optimizer.pt", resave, late_unfrozen), {}, "checkpoint-30"),
    Case("states of two equal shapes exchanged: not to be seen", at("checkpoint-30/optimizer.pt", resave, swapped), {}, "checkpoint-30"),
    Case("states in the reverse order", at("checkpoint-30/optimizer.pt", resave, reversed_order), {"checkpoint-30": "unsafe shape-mismatch@optimizer.pt"}, "checkpoint-20"),
    Case("optimizer of the save before", copied("checkpoint-20/optimizer.pt", "checkpoint-30"), {"checkpoint-30": "lossy|unsafe step-mismatch lr-mismatch?"}, "checkpoint-20", safe="checkpoint-20|checkpoint-30"),
    Case("optimizer of the save before, in the middle", copied("checkpoint-10/optimizer.pt", "checkpoint-20"), {"checkpoint-20": "lossy|unsafe step-mismatch lr-mismatch?"}, "checkpoint-30"),
    Case("optimizer of the save after, in the first", copied("checkpoint-20/optimizer.pt", "checkpoint-10"), {"checkpoint-10": "lossy|unsafe step-mismatch lr-mismatch?"}, "checkpoint-30"),
    Case("scheduler of the save before", copied("checkpoint-20/scheduler.pt", "checkpoint-30"), {"checkpoint-30": "lossy step-mismatch lr-mismatch?"}, "checkpoint-20", safe="checkpoint-30"),
    Case("RNG of the save before", copied("checkpoint-20/rng_state.pth", "checkpoint-30"), {"checkpoint-30": "lossy rng-mismatch"}, "checkpoint-20", safe="checkpoint-30"),
    Case("model of the save before", copied("checkpoint-20/model.safetensors", "checkpoint-30"), {"checkpoint-30": "lossy frozen-weights"}, "checkpoint-20", safe="checkpoint-30"),
    Case("trainer state of the save before", copied("checkpoint-20/trainer_state.json", "checkpoint-30"), {"checkpoint-30": "lossy|unsafe step-mismatch lr-mismatch? duplicate-checkpoint? frozen-weights?"}, "checkpoint-20", run="duplicate-checkpoint?", safe="checkpoint-20|checkpoint-30"),
    Case("optimizer, scheduler and RNG of the save before", each(*(copied(f"checkpoint-20/{n}", "checkpoint-30") for n in ("optimizer.pt", "scheduler.pt", "rng_state.pth"))), {"checkpoint-30": "lossy|unsafe step-mismatch rng-mismatch? lr-mismatch?"}, "checkpoint-20", safe="checkpoint-20|checkpoint-30"),
]  # fmt: skip

PLAIN = [
    Case("B79 empty state in the first save", each(at("ckpt_20.pt", drop), at("ckpt_30.pt", drop), at("latest", drop), at("ckpt_10.pt", resave, optimizer(no_state))), {"ckpt_10.pt": "unsafe invalid-optimizer"}, None, run="no-safe-checkpoint"),
    Case("B153 a torn snapshot", at("ckpt_30.pt", resave, optimizer(half_ahead)), {"ckpt_30.pt": "unsafe mixed-saves step-mismatch?"}, "ckpt_20.pt", run="pointer-to-unsafe"),
    Case("B96 steps as whole numbers [TRAP]", at("ckpt_*.pt", resave, optimizer(steps(lambda i, s: int(s)))), {}, "ckpt_30.pt"),
    Case("B88 moments in bf16 [TRAP]", at("ckpt_*.pt", resave, optimizer(moments(lambda t: t.bfloat16()))), {}, "ckpt_30.pt"),
    Case("B82 steps one behind throughout [TRAP]", at("ckpt_*.pt", resave, optimizer(steps(lambda i, s: s - 1))), {}, "ckpt_30.pt"),
    Case("B97 flat moments", at("ckpt_30.pt", resave, optimizer(flat(8))), {"ckpt_30.pt": "unsafe shape-mismatch"}, "ckpt_20.pt", run="pointer-to-unsafe"),
]  # fmt: skip

ACCELERATE = [
    Case("optimizer of the save before", copied("checkpoints/checkpoint_1/optimizer.bin", "checkpoints/checkpoint_2"), {"checkpoint_2": "lossy|unsafe step-mismatch lr-mismatch?"}, "checkpoint_1", safe="checkpoint_1|checkpoint_2", run="duplicate-checkpoint?"),
    Case("scheduler of the save before", copied("checkpoints/checkpoint_1/scheduler.bin", "checkpoints/checkpoint_2"), {"checkpoint_2": "lossy step-mismatch lr-mismatch?"}, "checkpoint_1", safe="checkpoint_2"),
    Case("RNG of the save before: not to be seen, as nothing says that every step draws", copied("checkpoints/checkpoint_1/random_states_0.pkl", "checkpoints/checkpoint_2"), {}, "checkpoint_2"),
    Case("model of the save before", copied("checkpoints/checkpoint_1/model.safetensors", "checkpoints/checkpoint_2"), {"checkpoint_2": "lossy frozen-weights"}, "checkpoint_1", safe="checkpoint_2"),
]  # fmt: skip


@pytest.mark.parametrize("case", TRAINER, ids=str)
def test_trainer(case: Case, holds: Holds, trainer_run: Path) -> None:
    assert holds(case, trainer_run) == []


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_loop(case: Case, holds: Holds, plain_run: Path) -> None:
    assert holds(case, plain_run) == []


@pytest.mark.parametrize("case", ACCELERATE, ids=str)
def test_accelerate(case: Case, holds: Holds, accelerate_run: Path) -> None:
    assert holds(case, accelerate_run) == []

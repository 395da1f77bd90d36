"""K8 to K17: schedules, scalers, data positions, counters, RNG, averages, pickles, torn and poisoned saves."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptguard.testing_cases import Case, at, copied, each
from ckptguard.testing_damage import drop, edit_json, edit_weights, resave

Holds = Callable[[Case, Path], list[str]]
Change = Callable[[dict[str, Any]], Any]
FILES = ("ckpt_10.pt", "ckpt_20.pt", "ckpt_30.pt")


def put(**entries: Any) -> Change:
    return lambda state: state.update(entries)


def by_step(make: Callable[[int], dict[str, Any]]) -> Callable[[Path], None]:
    """Add to each file of the plain loop what this gives for its step."""
    return each(*(at(f"ckpt_{n}.pt", resave, put(**make(n))) for n in (10, 20, 30)))


def scheduler(*last: int) -> Callable[[Path], None]:
    return each(
        *(
            at(f, resave, lambda s, n=n: s["scheduler"].update(last_epoch=n, _step_count=n + 1))
            for f, n in zip(FILES, last)
        )
    )


def trainer_scheduler(*last: int) -> Callable[[Path], None]:
    return each(
        *(
            at(
                f"checkpoint-{c}/scheduler.pt",
                resave,
                lambda s, n=n: s.update(last_epoch=n, _step_count=n + 1),
            )
            for c, n in zip((10, 20, 30), last)
        )
    )


def scaler(*scales: float) -> Callable[[Path], None]:
    return each(
        *(
            at(
                f,
                resave,
                put(
                    scaler={
                        "scale": s,
                        "growth_factor": 2.0,
                        "backoff_factor": 0.5,
                        "growth_interval": 2000,
                        "_growth_tracker": 3,
                    }
                ),
            )
            for f, s in zip(FILES, scales)
        )
    )


def sampler(*positions: int) -> Callable[[Path], None]:
    return each(
        *(
            at(
                f,
                resave,
                put(dataloader={"sampler_iter_state": {"yielded": p}, "_num_yielded": p, "epoch": 0}),
            )
            for f, p in zip(FILES, positions)
        )
    )


def averaged(decay: float = 0.5, updates: bool = True) -> Callable[[Path], None]:
    """Averaged weights in every file, with or without their counter."""

    def make(run: Path) -> None:
        mean: dict[str, torch.Tensor] = {}
        for file in FILES:

            def change(state: dict[str, Any]) -> None:
                for name, t in state["model"].items():
                    mean[name] = mean[name] * decay + t * (1 - decay) if name in mean else t * 0.9
                state["ema"] = {n: t.clone() for n, t in mean.items()}
                if updates:
                    state["ema_updates"] = state["step"]

            resave(run / file, change)

    return make


def only_average(state: dict[str, Any]) -> None:
    state["ema"] = state.pop("model")


def half_older(run: Path) -> None:
    """Half of the weights of the save before: a torn or partial write."""
    older = torch.load(run / "ckpt_20.pt", weights_only=False)["model"]

    def change(state: dict[str, Any]) -> None:
        for place, name in enumerate(state["model"]):
            if place % 2:
                state["model"][name] = older[name]

    resave(run / "ckpt_30.pt", change)


def layer_older(run: Path, new: str = "ckpt_30.pt", old: str = "ckpt_20.pt") -> None:
    older = torch.load(run / old, weights_only=False)["model"]
    resave(
        run / new, lambda s: s["model"].update({n: t for n, t in older.items() if n.startswith("layers.1.")})
    )


def frozen_layer(run: Path) -> None:
    first = torch.load(run / "ckpt_10.pt", weights_only=False)["model"]
    for file in FILES:
        resave(
            run / file,
            lambda s: s["model"].update(
                {n: t for n, t in first.items() if n.startswith(("layers.0.", "embed"))}
            ),
        )


def trainer_layer_older(run: Path) -> None:
    from safetensors.torch import load_file

    older = load_file(run / "checkpoint-20/model.safetensors")
    edit_weights(
        run / "checkpoint-30/model.safetensors",
        lambda w: w.update({n: t for n, t in older.items() if ".h.1." in n}),
    )


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def poisoned(state: dict[str, Any]) -> None:
    state["model"]["layers.0.norm.weight"][3] = float("inf")


def scaled(factor: float, name: str = "layers.1.up.weight") -> Change:
    return lambda state: state["model"].update({name: state["model"][name] * factor})


LATEST_UNSAFE = "pointer-to-unsafe"

PLAIN = [
    Case("B105 the scheduler is one behind throughout [TRAP]", scheduler(9, 19, 29), {}, "ckpt_30.pt"),
    Case("B105 the offset differs", scheduler(9, 19, 23), {"ckpt_30.pt": "lossy step-mismatch"}, "ckpt_20.pt", safe="ckpt_30.pt"),
    Case("B103 the scheduler counts epochs at one save", scheduler(10, 20, 3), {"ckpt_30.pt": "lossy step-mismatch"}, "ckpt_20.pt", safe="ckpt_30.pt"),
    Case("B101 the scheduler is at twice the step", scheduler(10, 20, 60), {"ckpt_30.pt": "lossy step-mismatch"}, "ckpt_20.pt", safe="ckpt_30.pt"),
    Case("the scheduler steps once an epoch [TRAP]", each(by_step(lambda n: {"epoch": n // 10}), scheduler(1, 2, 3)), {}, "ckpt_30.pt"),
    Case("B111 fp16, and an empty scaler", by_step(lambda n: {"scaler": {}, "fp16": True}), dict.fromkeys(FILES, "lossy|exact missing-scaler?"), "ckpt_30.pt"),
    Case("B111 bf16, and a disabled scaler [TRAP]", by_step(lambda n: {"scaler": {}, "bf16": True}), {}, "ckpt_30.pt"),
    Case("B111 the newest lost its scaler", each(scaler(65536.0, 65536.0)), {"ckpt_30.pt": "lossy missing-scaler"}, "ckpt_20.pt", safe="ckpt_30.pt"),
    Case("a scaler that moves [TRAP]", scaler(65536.0, 32768.0, 131072.0), {}, "ckpt_30.pt"),
    Case("B113 the scale fell to its minimum", scaler(65536.0, 512.0, 1.0), {"ckpt_30.pt": "lossy|unsafe scaler-mismatch", "ckpt_20.pt": "exact|lossy scaler-mismatch?"}, "ckpt_20.pt|ckpt_10.pt", safe="ckpt_30.pt|ckpt_20.pt"),
    Case("B113 the scale is zero", scaler(65536.0, 512.0, 0.0), {"ckpt_30.pt": "lossy|unsafe scaler-mismatch"}, "ckpt_20.pt", safe="ckpt_30.pt|ckpt_20.pt"),
    Case("B112 an infinity in a norm layer", at("ckpt_30.pt", resave, poisoned), {"ckpt_30.pt": "unsafe nonfinite-weights@layers.0.norm.weight"}, "ckpt_20.pt", run=LATEST_UNSAFE),
    Case("B112 an infinity in the first", at("ckpt_10.pt", resave, poisoned), {"ckpt_10.pt": "unsafe nonfinite-weights@layers.0.norm.weight"}, "ckpt_30.pt"),
    Case("B14 the loader is ahead of the model", sampler(10, 20, 31), {"ckpt_30.pt": "lossy data-position-mismatch"}, "ckpt_20.pt", safe="ckpt_30.pt"),
    Case("the loader keeps pace [TRAP]", sampler(10, 20, 30), {}, "ckpt_30.pt"),
    Case("the loader counts samples [TRAP]", sampler(40, 80, 120), {}, "ckpt_30.pt"),
    Case("B132 the loader is one behind throughout [TRAP]", sampler(9, 19, 29), {}, "ckpt_30.pt"),
    Case("B131 no loader in any [TRAP]", each(), {}, "ckpt_30.pt"),
    Case("the newest lost its loader", sampler(10, 20), {"ckpt_30.pt": "lossy missing-dataloader"}, "ckpt_20.pt", safe="ckpt_30.pt"),
    Case("B143 averages with their counter [TRAP]", averaged(), {}, "ckpt_30.pt"),
    Case("B143 averages without a counter [TRAP]", averaged(updates=False), {}, "ckpt_30.pt"),
    Case("B143 the newest lost the counter", each(averaged(), at("ckpt_30.pt", resave, lambda s: s.__delitem__("ema_updates"))), {"ckpt_30.pt": "exact|lossy ema-mismatch?"}, "ckpt_30.pt|ckpt_20.pt", safe="ckpt_30.pt"),
    Case("the newest lost the averages", each(averaged(), at("ckpt_30.pt", resave, lambda s: s.__delitem__("ema"))), {"ckpt_30.pt": "lossy ema-mismatch"}, "ckpt_20.pt", safe="ckpt_30.pt"),
    Case("the averages are the weights", each(averaged(), at("ckpt_30.pt", resave, lambda s: s.update(ema=dict(s["model"])))), {"ckpt_30.pt": "lossy ema-mismatch"}, "ckpt_20.pt", safe="ckpt_30.pt"),
    Case("B146 averages only", at("ckpt_*.pt", resave, only_average), dict.fromkeys(FILES, "lossy ema-mismatch"), "ckpt_30.pt"),
    Case("B146 averages only, in the newest", at("ckpt_30.pt", resave, only_average), {"ckpt_30.pt": "lossy|unsafe ema-mismatch|missing-model frozen-weights? weight-jump?"}, "ckpt_20.pt", safe="ckpt_20.pt|ckpt_30.pt", run="pointer-to-unsafe?"),
    Case("B147 numpy scalars and a namespace [TRAP]", by_step(lambda n: {"best": np.float64(1.5), "args": argparse.Namespace(lr=0.1)}), {}, "ckpt_30.pt"),
    Case("B148 numpy arrays [TRAP]", by_step(lambda n: {"history": np.arange(5.0), "kind": np.dtype("float32")}), {}, "ckpt_30.pt"),
    Case("B147 a call of the system", at("ckpt_30.pt", resave, put(extra=Payload())), {"ckpt_30.pt": "unsafe unsafe-pickle"}, "ckpt_20.pt", run=LATEST_UNSAFE),
    Case("B153 half of the weights are of the save before", half_older, {"ckpt_30.pt": "lossy|unsafe frozen-weights|mixed-saves"}, "ckpt_20.pt", safe="ckpt_20.pt|ckpt_30.pt", gate="ckpt_20.pt|ckpt_30.pt", run="pointer-to-unsafe?"),
    Case("one layer is of the save before", layer_older, {"ckpt_30.pt": "lossy|unsafe frozen-weights|mixed-saves"}, "ckpt_20.pt", safe="ckpt_20.pt|ckpt_30.pt", gate="ckpt_20.pt|ckpt_30.pt", run="pointer-to-unsafe?"),
    Case("one layer is of the save before, in the middle", lambda run: layer_older(run, "ckpt_20.pt", "ckpt_10.pt"), {"ckpt_20.pt": "lossy|unsafe frozen-weights|mixed-saves"}, "ckpt_30.pt"),
    Case("frozen layers [TRAP]", frozen_layer, {}, "ckpt_30.pt"),
    Case("a matrix a hundredfold in the newest", at("ckpt_30.pt", resave, scaled(100.0)), {"ckpt_30.pt": "lossy weight-jump@layers.1.up.weight"}, "ckpt_20.pt", safe="ckpt_30.pt", gate="ckpt_30.pt"),
    Case("a matrix a hundredfold in the middle", at("ckpt_20.pt", resave, scaled(100.0)), {"ckpt_20.pt": "lossy weight-jump@layers.1.up.weight"}, "ckpt_30.pt"),
    Case("a matrix of zeros in the middle", at("ckpt_20.pt", resave, scaled(0.0)), {"ckpt_20.pt": "unsafe zero-weights@layers.1.up.weight"}, "ckpt_30.pt"),
    Case("RNG of the save before", each(lambda run: resave(run / "ckpt_30.pt", lambda s: s.update(rng=torch.load(run / "ckpt_20.pt", weights_only=False)["rng"]))), {"ckpt_30.pt": "lossy|exact rng-mismatch?"}, "ckpt_20.pt|ckpt_30.pt", safe="ckpt_30.pt"),
]  # fmt: skip

TRAINER = [
    Case("B105 the scheduler is one behind throughout [TRAP]", trainer_scheduler(9, 19, 29), {}, "checkpoint-30"),
    Case("B105 the offset differs", trainer_scheduler(9, 19, 23), {"checkpoint-30": "lossy step-mismatch"}, "checkpoint-20", safe="checkpoint-30"),
    Case("B98 no scheduler in any", at("checkpoint-*/scheduler.pt", drop), {f"checkpoint-{n}": "lossy missing-scheduler" for n in (10, 20, 30)}, "checkpoint-30"),
    Case("B129 the batch size is another", at("checkpoint-30/trainer_state.json", edit_json, lambda s: s.update(train_batch_size=1)), {"checkpoint-30": "lossy|exact config-mismatch|data-position-mismatch?"}, "checkpoint-30|checkpoint-20", safe="checkpoint-30"),
    Case("B142 RNG of the save before", copied("checkpoint-20/rng_state.pth", "checkpoint-30"), {"checkpoint-30": "lossy rng-mismatch"}, "checkpoint-20", safe="checkpoint-30"),
    Case("B142 RNG of the save after, in the middle", copied("checkpoint-30/rng_state.pth", "checkpoint-20"), {"checkpoint-20": "exact|lossy rng-mismatch?", "checkpoint-30": "exact|lossy rng-mismatch?"}, "checkpoint-30|checkpoint-20|checkpoint-10", safe="checkpoint-30"),
    Case("one layer is of the save before", trainer_layer_older, {"checkpoint-30": "lossy|unsafe frozen-weights|mixed-saves"}, "checkpoint-20", safe="checkpoint-20|checkpoint-30", gate="checkpoint-20|checkpoint-30"),
]  # fmt: skip


@pytest.mark.parametrize("case", TRAINER, ids=str)
def test_trainer(case: Case, holds: Holds, trainer_run: Path) -> None:
    assert holds(case, trainer_run) == []


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_loop(case: Case, holds: Holds, plain_run: Path) -> None:
    assert holds(case, plain_run) == []

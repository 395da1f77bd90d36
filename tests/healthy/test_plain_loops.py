"""Training loops as people write them: whatever they call things, a healthy run gives no warning and no error."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptguard.inspect import Options, audit
from ckptguard.model import Resume, Verdict

State = dict[str, Any]


def quiet(run: Path, expected: Resume | None = Resume.EXACT, count: int = 3) -> tuple[Verdict, ...]:
    """The verdicts on a run that must be silent."""
    (report,) = audit(str(run), Options(grace=0.0))
    loud = [f"{v.path}: {f.code} {f.message}" for v in report.checkpoints for f in v.findings if f.loud]
    loud += [f"run: {f.code} {f.message}" for f in report.findings if f.loud]
    assert not loud, "\n".join(loud)
    assert len(report.checkpoints) == count
    assert all(v.resume is expected if expected else v.resume.safe for v in report.checkpoints)
    return report.checkpoints


class Loop:
    """A small model on learnable data; `steps` yields after every fourth optimizer step."""

    def __init__(
        self, optimizer: Callable[..., Any] = torch.optim.AdamW, scheduler: Any = None, **options: Any
    ) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        self.model = nn.Sequential(
            nn.Embedding(32, 16), nn.Linear(16, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 32)
        )
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 1e-3, **options})
        make = scheduler or (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 100))
        self.scheduler = make(self.optimizer)
        self.step = 0
        self.data = torch.Generator().manual_seed(5)

    def steps(self, saves: int = 3, every: int = 4) -> Iterator[int]:
        for _ in range(saves * every):
            tokens = torch.randint(0, 32, (8, 6), generator=self.data)
            loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self._schedule(loss)
            self.step += 1
            if self.step % every == 0:
                yield self.step

    def _schedule(self, loss: torch.Tensor) -> None:
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss.item())
        elif self.scheduler is not None:
            self.scheduler.step()

    def parts(self) -> State:
        parts: State = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": {
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "torch": torch.get_rng_state(),
            },
        }
        if self.scheduler is not None:
            parts["scheduler"] = self.scheduler.state_dict()
        return parts


# --- optimizers ---------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """One moment, and the sign of it."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("exp_avg", torch.zeros_like(p))
                p.add_(state["exp_avg"].lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 0.01)


class EightBit(torch.optim.Optimizer):
    """Moments in blocks of bytes with one scale each, as 8-bit optimizers keep them."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                for name, value in (("1", p.grad), ("2", p.grad.square())):
                    scale = value.abs().max()
                    state[f"state{name}"] = (value / (scale + 1e-12) * 127 + 128).to(torch.uint8)
                    state[f"absmax{name}"] = scale.reshape(1)
                    state[f"qmap{name}"] = torch.linspace(-1, 1, 256)
                p.add_(p.grad, alpha=-group["lr"])


class ScheduleFree(torch.optim.Optimizer):
    """An average of the iterates in place of a schedule."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(
            params,
            {"lr": lr, "k": 0, "train_mode": True, "weight_sum": 0.0, "lr_max": lr, "betas": (0.9, 0.999)},
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += 1.0
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("z", p.clone())
                state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad.square(), 0.001)
                state["z"].add_(p.grad, alpha=-group["lr"])
                p.lerp_(state["z"], 0.1)


def muon_and_adam(parameters: Any, lr: float) -> Any:
    """Matrices by Muon, all else by AdamW: two optimizers in one object, as people combine them."""
    every = list(parameters)
    matrices = [p for p in every if p.ndim == 2]
    rest = [p for p in every if p.ndim != 2]

    class Both(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.muon = torch.optim.Muon(matrices, lr=lr)
            self.adam = torch.optim.AdamW(rest, lr=lr)
            super().__init__([{"params": every}], {"lr": lr})

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.muon.zero_grad()
            self.adam.zero_grad()

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.muon.step()
            self.adam.step()

        def state_dict(self) -> Any:
            return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    return Both()


OPTIMIZERS: dict[str, tuple[Any, State]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "AdamW capturable rate": (torch.optim.AdamW, {"lr": torch.tensor(1e-3), "foreach": False}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.01}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "Lion": (Lion, {}),
    "8-bit": (EightBit, {}),
    "schedule-free": (ScheduleFree, {}),
    "Muon and AdamW": (muon_and_adam, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str, tmp_path: Path) -> None:
    make, options = OPTIMIZERS[name]
    scheduler = (lambda o: None) if name in ("schedule-free", "Muon and AdamW") else None
    loop = Loop(make, scheduler=scheduler, **options)
    for step in loop.steps():
        torch.save({**loop.parts(), "step": step}, tmp_path / f"ckpt_{step}.pt")
    quiet(tmp_path)


# --- schedules ----------------------------------------------------------------------------------------

S = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: S.LambdaLR(o, lambda n: min(1.0, (n + 1) / 5)),
    "warmup and cosine": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=4), S.CosineAnnealingLR(o, 20)], [4]
    ),
    "chained": lambda o: S.ChainedScheduler([S.ConstantLR(o), S.ExponentialLR(o, 0.99)]),
    "one cycle": lambda o: S.OneCycleLR(o, 1e-2, total_steps=20),
    "restarts": lambda o: S.CosineAnnealingWarmRestarts(o, 5),
    "steps": lambda o: S.StepLR(o, 3),
    "multi-step": lambda o: S.MultiStepLR(o, [3, 7]),
    "plateau": lambda o: S.ReduceLROnPlateau(o, patience=1),
    "cyclic": lambda o: S.CyclicLR(o, 1e-4, 1e-3, cycle_momentum=False),
    "polynomial": lambda o: S.PolynomialLR(o, 30),
    "none": lambda o: None,
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(name: str, tmp_path: Path) -> None:
    loop = Loop(scheduler=SCHEDULERS[name])
    for step in loop.steps():
        torch.save({**loop.parts(), "global_step": step}, tmp_path / f"step_{step:06d}.pt")
    quiet(tmp_path)


# --- spellings ----------------------------------------------------------------------------------------


def _flat(loop: Loop, step: int, folder: Path) -> None:
    torch.save(
        {
            **{f"model.{k}": v for k, v in loop.model.state_dict().items()},
            "optimizer_state_dict": loop.optimizer.state_dict(),
            "lr_scheduler_state_dict": loop.scheduler.state_dict(),
            "iteration": step,
        },
        folder / f"iter_{step}.pth",
    )


def _tutorial(loop: Loop, step: int, folder: Path) -> None:
    torch.save(
        {
            "epoch": step // 4,
            "model_state_dict": loop.model.state_dict(),
            "optimizer_state_dict": loop.optimizer.state_dict(),
            "loss": 0.5,
        },
        folder / f"checkpoint_epoch_{step // 4}.pt",
    )


def _wrapped(loop: Loop, step: int, folder: Path) -> None:
    names = {f"module._orig_mod.{k}": v for k, v in loop.model.state_dict().items()}
    torch.save({**loop.parts(), "model": names, "iter_num": step}, folder / f"ckpt-{step}.pt")


def _nested(loop: Loop, step: int, folder: Path) -> None:
    torch.save({"state": {"net": loop.model.state_dict(), "opt": loop.optimizer.state_dict(), "sched": loop.scheduler.state_dict()}, "meta": {"step": step}}, folder / f"{step}.pt")  # fmt: skip


def _legacy(loop: Loop, step: int, folder: Path) -> None:
    torch.save(
        {**loop.parts(), "step": step}, folder / f"ckpt_{step}.pth", _use_new_zipfile_serialization=False
    )


def _with_ema(loop: Loop, step: int, folder: Path) -> None:
    ema = getattr(loop, "ema", None) or torch.optim.swa_utils.AveragedModel(loop.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))  # fmt: skip
    loop.ema = ema  # type: ignore[attr-defined]
    ema.update_parameters(loop.model)
    torch.save({**loop.parts(), "ema": ema.state_dict(), "step": step}, folder / f"ckpt_{step}.pt")


def _folders(loop: Loop, step: int, folder: Path) -> None:
    place = folder / f"step-{step}"
    place.mkdir()
    torch.save(loop.model.state_dict(), place / "model.pt")
    torch.save(loop.optimizer.state_dict(), place / "optimizer.pt")
    torch.save(loop.scheduler.state_dict(), place / "scheduler.pt")
    torch.save({"step": step}, place / "state.pt")


def _several(loop: Loop, step: int, folder: Path) -> None:
    torch.save(loop.model.state_dict(), folder / f"model_{step}.pt")
    torch.save(loop.optimizer.state_dict(), folder / f"optim_{step}.pt")


def _latest_link(loop: Loop, step: int, folder: Path) -> None:
    torch.save({**loop.parts(), "step": step}, folder / f"ckpt_{step}.pt")
    (folder / "latest.pt").unlink(missing_ok=True)
    (folder / "latest.pt").symlink_to(f"ckpt_{step}.pt")


def _numpy_counters(loop: Loop, step: int, folder: Path) -> None:
    torch.save({**loop.parts(), "step": np.int64(step), "best": np.float32(0.5), "history": np.arange(step), "config": {"lr": 1e-3}}, folder / f"ckpt_{step}.pt")  # fmt: skip


def _bfloat16(loop: Loop, step: int, folder: Path) -> None:
    torch.save({**loop.parts(), "model": {k: v.bfloat16() for k, v in loop.model.state_dict().items()}, "step": step}, folder / f"ckpt_{step}.pt")  # fmt: skip


SPELLINGS = (
    _flat,
    _tutorial,
    _wrapped,
    _nested,
    _legacy,
    _with_ema,
    _folders,
    _several,
    _latest_link,
    _numpy_counters,
    _bfloat16,
)


@pytest.mark.parametrize("save", SPELLINGS, ids=lambda s: s.__name__.strip("_"))
def test_spelling(save: Callable[[Loop, int, Path], None], tmp_path: Path) -> None:
    loop = Loop()
    for step in loop.steps():
        save(loop, step, tmp_path)
    for verdict in quiet(tmp_path, None):  # lossy where the loop saves no generators
        assert verdict.components["model"] is True
        assert verdict.components["optimizer"] is True
        assert verdict.step is not None or save is _tutorial  # which counts epochs only


# --- what training may do -----------------------------------------------------------------------------


def test_gradient_accumulation_and_a_resume(tmp_path: Path) -> None:
    """Counters of micro-batches beside counters of steps, and a second attempt that continues the first."""
    loop = Loop()
    for step in loop.steps(saves=2):
        torch.save({**loop.parts(), "step": step, "micro_step": step * 8}, tmp_path / f"ckpt_{step}.pt")
    held = torch.load(tmp_path / "ckpt_8.pt", weights_only=False)
    again = Loop()
    again.model.load_state_dict(held["model"])
    again.optimizer.load_state_dict(held["optimizer"])
    again.scheduler.load_state_dict(held["scheduler"])
    again.step = held["step"]
    for step in again.steps(saves=1):
        torch.save({**again.parts(), "step": step, "micro_step": step * 8}, tmp_path / f"ckpt_{step}.pt")
    quiet(tmp_path)


def test_frozen_parameters_and_a_tied_head(tmp_path: Path) -> None:
    loop = Loop()
    loop.model[0].weight.requires_grad_(False)
    loop.model[1].bias = loop.model[1].bias
    loop.optimizer = torch.optim.AdamW([p for p in loop.model.parameters() if p.requires_grad], lr=1e-3)
    loop.scheduler = S.CosineAnnealingLR(loop.optimizer, 100)
    for step in loop.steps():
        state = loop.model.state_dict()
        torch.save(
            {**loop.parts(), "model": {**state, "head.weight": state["0.weight"]}, "step": step},
            tmp_path / f"ckpt_{step}.pt",
        )
    quiet(tmp_path)


def test_a_loss_scaler(tmp_path: Path) -> None:
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    for step in loop.steps():
        for _ in range(4):
            scaler.scale(torch.ones(()))
            scaler._growth_tracker.add_(1)
        scaler._growth_tracker.remainder_(3)
        torch.save(
            {**loop.parts(), "scaler": scaler.state_dict(), "step": step}, tmp_path / f"ckpt_{step}.pt"
        )
    quiet(tmp_path)


def test_weights_alone_are_lossy_and_silent(tmp_path: Path) -> None:
    loop = Loop()
    for step in loop.steps():
        torch.save(copy.deepcopy(loop.model.state_dict()), tmp_path / f"weights_{step}.pt")
    quiet(tmp_path, Resume.LOSSY)

"""A function that returns a Lightning (Trainer, module, data): its own fit() resumes and replays, nothing is written.

Lightning saves no random generators. Each repeat therefore gets another seed, so that the measured noise holds what the
missing generators change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptguard.record.fingerprints import fingerprint, join_fingerprints
from ckptguard.restore.held import Refused
from ckptguard.restore.model import StepNumbers
from ckptguard.restore.plain import on_host
from ckptguard.restore.session import Session, StateOf, Stop


def run(session: Session, recipe: tuple[Any, ...], device: str) -> None:
    """Resume, check, replay. Raises what the training raises; Refused where loading the checkpoint failed."""
    trainer, module, *data = recipe
    switch_off(trainer, session.order.scratch)
    watch = _watch(session, trainer)
    trainer.callbacks.insert(0, watch)
    source = data[0] if data else None
    kind = "datamodule" if hasattr(source, "prepare_data_per_node") else "train_dataloaders"
    try:
        trainer.fit(
            module, ckpt_path=session.order.checkpoint, **({kind: source} if source is not None else {})
        )
    except Stop:
        return
    except Exception as error:
        if not watch.started and _in_loading(error):
            raise Refused(f"the Trainer does not resume from it: {type(error).__name__}: {error}") from error
        raise
    session.not_run("replay", f"the training ended at step {trainer.global_step}")


def switch_off(trainer: Any, scratch: str) -> None:
    """No checkpoints, loggers or progress bars; a temporary root directory. What computes stays as it is."""
    trainer.loggers = []
    trainer._default_root_dir = scratch
    silent = ("Checkpoint", "ProgressBar", "ModelSummary")
    trainer.callbacks = [
        c for c in trainer.callbacks if not any(b.__name__ in silent for b in type(c).__mro__)
    ]


def _in_loading(error: BaseException) -> bool:
    """Whether it was raised while Lightning restored: any frame of its checkpoint connector."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith("checkpoint_connector.py"):
            return True
        trace = trace.tb_next
    return False


def _watch(session: Session, trainer: Any) -> Any:
    """A callback of the package that the Trainer is of: lightning and pytorch_lightning do not know each other's."""
    import importlib

    package = type(trainer).__module__.removesuffix(".trainer.trainer")
    base: Any = importlib.import_module(f"{package}.callbacks").Callback

    class Watch(base):  # type: ignore[misc]  # known when it runs only
        def __init__(self) -> None:
            self.started = False
            self.last = 0
            self.step = 0
            self.losses: list[float] = []
            self.batches: list[str] = []
            self.lr: float | None = None
            self.norm: float | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.started = True
            session.environment(str(trainer.strategy.root_device))
            session.note("loaded")
            session.check_state(_states(trainer, pl_module))
            session.seed()
            self.step = trainer.global_step
            self.last = max(self.step + session.order.steps, session.order.until or 0)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.batches.append(fingerprint(on_host(batch)))

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.lr = float(optimizer.param_groups[0]["lr"])
            self.norm = _norm(pl_module)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if loss is not None:
                self.losses.append(float(loss))
            if trainer.global_step == self.step:
                return  # gradients are being accumulated
            self.step = trainer.global_step
            mean = sum(self.losses) / len(self.losses) if self.losses else None
            session.step(
                StepNumbers(self.step, mean, self.norm, self.lr, batch=join_fingerprints(self.batches))
            )
            self.losses, self.batches = [], []
            if self.step == session.order.until:
                # Schedulers of an epoch step after its last batch, before or after the save: they are not compared.
                states = _states(trainer, pl_module)
                session.check_against({n: s for n, s in states.items() if not n.startswith("scheduler")})
            if self.step >= self.last:
                raise Stop

    return Watch()


def _states(trainer: Any, module: Any) -> dict[str, StateOf]:
    states: dict[str, StateOf] = {"model": module.state_dict}
    for at, optimizer in enumerate(trainer.optimizers):
        states["optimizer" if at == 0 else f"optimizer_{at}"] = optimizer.state_dict
    for at, config in enumerate(trainer.lr_scheduler_configs):
        states["scheduler" if at == 0 else f"scheduler_{at}"] = config.scheduler.state_dict
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        states["scaler"] = scaler.state_dict
    return states


def _norm(module: Any) -> float | None:
    import torch

    norms = [p.grad.detach().float().norm() for p in module.parameters() if p.grad is not None]
    return float(torch.stack(norms).norm()) if norms else None

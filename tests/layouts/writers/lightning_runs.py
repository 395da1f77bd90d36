"""Writes Lightning runs of many kinds: python lightning_runs.py OUT RANK PORT [NAME...]; one CPU process."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

OUT = Path(sys.argv[1])
os.environ["OMP_NUM_THREADS"] = "1"
warnings.filterwarnings("ignore")

import lightning as pl  # noqa: E402 - its imports warn
import torch  # noqa: E402
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint  # noqa: E402

torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(pl.LightningModule):
    def __init__(self, *, schedule: str = "step", frozen: bool = False, optimizer: str = "adamw") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.up = torch.nn.Linear(6, 10)
        self.norm = torch.nn.BatchNorm1d(10)
        self.down = torch.nn.Linear(10, 3)
        self.schedule, self.kind = schedule, optimizer
        if frozen:
            self.up.requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.down(torch.relu(self.norm(self.up(x)))), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        chosen = (
            torch.optim.SGD(parameters, lr=0.1)
            if self.kind == "sgd"
            else torch.optim.AdamW(parameters, lr=1e-2)
        )
        if not self.schedule:
            return chosen
        if self.schedule == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(chosen)
            return {
                "optimizer": chosen,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "loss", "interval": "epoch"},
            }
        scheduler = torch.optim.lr_scheduler.StepLR(chosen, 2, 0.5)
        return {"optimizer": chosen, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


class Sharded(Net):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for layer in (self.up, self.norm, self.down):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Gan(pl.LightningModule):
    """Two optimizers by hand: global_step counts the steps of both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.two = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)

    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        for net, optimizer in zip((self.one, self.two), self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.mse_loss(net(x), y))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.one.parameters(), lr=1e-3),
            torch.optim.AdamW(self.two.parameters(), lr=1e-3),
        ]


def loader(stateful: bool = False) -> Any:
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randn(64, 3))
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(data, batch_size=8)
    return torch.utils.data.DataLoader(data, batch_size=8)


def train(
    name: str,
    net: Any = None,
    *,
    saver: dict[str, Any] | None = None,
    resume: str = "",
    steps: int = 24,
    callbacks: Any = (),
    stateful: bool = False,
    **more: Any,
) -> None:
    torch.manual_seed(1)
    keep = ModelCheckpoint(
        dirpath=OUT / name, **{"every_n_train_steps": 8, "save_top_k": -1, **(saver or {})}
    )
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[keep, *callbacks], default_root_dir=OUT / name, log_every_n_steps=1, **more,
    )  # fmt: skip
    trainer.fit(net or Net(), loader(stateful), ckpt_path=str(OUT / resume) if resume else None)


def sharded(name: str) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    train(name, Sharded(), strategy=ModelParallelStrategy(save_distributed_checkpoint=True))


RUNS: dict[str, Any] = {
    "plain": lambda n: train(n, saver={"save_last": True}),
    "link": lambda n: train(
        n, saver={"save_last": "link", "filename": "{step}-{loss:.2f}", "monitor": "loss", "save_top_k": 2}
    ),
    "epochs": lambda n: train(
        n, Net(schedule="epoch"), saver={"every_n_train_steps": None, "every_n_epochs": 1}
    ),
    "plateau": lambda n: train(
        n, Net(schedule="plateau"), saver={"every_n_train_steps": None, "every_n_epochs": 1}
    ),
    "accumulated": lambda n: train(
        n, accumulate_grad_batches=2, precision="bf16-mixed", gradient_clip_val=1.0
    ),
    "frozen-sgd": lambda n: train(n, Net(frozen=True, optimizer="sgd", schedule="")),
    "gan": lambda n: train(n, Gan(), steps=48, saver={"every_n_train_steps": 16}),
    "ema": lambda n: train(n, callbacks=[EMAWeightAveraging(decay=0.9)]),
    "weights-only": lambda n: train(n, saver={"save_weights_only": True}),
    "resumed": lambda n: (train(n, steps=16), train(n, steps=32, resume=f"{n}/epoch=1-step=16.ckpt")),
    "stateful": lambda n: train(n, stateful=True),
    "named-by-hand": lambda n: train(n, saver={"filename": "mine-{step}"}),
    "sharded": sharded,
}

if __name__ == "__main__":
    for name in sys.argv[4:] or list(RUNS):
        RUNS[name](name)

"""A real Lightning training of a tiny model: `make` is the recipe."""

from __future__ import annotations

import os

import lightning
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

torch.set_num_threads(1)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, at):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make():
    maker = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 8, generator=maker)
    targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(64, 1, generator=maker)
    data = StatefulDataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4)
    out = os.environ.get("TEST_OUTPUT", "out")
    trainer = lightning.Trainer(
        max_steps=24,
        accelerator="cpu",
        devices=1,
        default_root_dir=out,
        log_every_n_steps=1,
        enable_progress_bar=False,
        logger=lightning.pytorch.loggers.CSVLogger(out, name="", version=""),
        callbacks=[
            lightning.pytorch.callbacks.ModelCheckpoint(
                os.path.join(out, "checkpoints"), filename="{step}", every_n_train_steps=6, save_top_k=-1
            )
        ],
    )
    return trainer, Module(), data

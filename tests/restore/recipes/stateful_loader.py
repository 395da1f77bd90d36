"""A loop over torchdata's own stateful loader, shuffled, across the end of an epoch."""

from __future__ import annotations

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

torch.set_num_threads(1)


class Loop:
    def build(self, device: str) -> dict:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
        inputs = torch.randn(40, 8, generator=torch.Generator().manual_seed(4))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        self.batches = None
        return {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
            "dataloader": StatefulDataLoader(data, batch_size=4, shuffle=True),
        }

    def step(self, parts: dict) -> dict:
        try:
            batch = next(self.batches or iter(()))
        except StopIteration:
            self.batches = iter(parts["dataloader"])
            batch = next(self.batches)
        loss = (parts["model"](batch[0]) - batch[1]).square().mean()
        loss.backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        return {"loss": loss, "batch": batch}


class Accelerated:
    """Parts that accelerate prepared; the batches come from torch's generator."""

    def build(self, device: str) -> dict:
        from accelerate import Accelerator

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        self.accelerator = Accelerator(cpu=True)
        model, optimizer, scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def step(self, parts: dict) -> dict:
        inputs = torch.randn(4, 8)
        loss = (parts["model"](inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.accelerator.backward(loss)
        lr = parts["scheduler"].get_last_lr()
        parts["optimizer"].step()
        parts["scheduler"].step()
        parts["optimizer"].zero_grad()
        return {"loss": loss, "lr": lr}

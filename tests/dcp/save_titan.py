"""Trains a tiny model with torchtitan's own containers and checkpoint manager, two gloo processes: `python save_titan.py OUT`."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WORLD = 2
STEPS = 6


class State:
    """What torchtitan's trainer keeps of itself."""

    def __init__(self) -> None:
        self.step = 0
        self.ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def loader(rank: int) -> Any:
    from torch.utils.data import IterableDataset
    from torchtitan.components.dataloader import ParallelAwareDataloader

    class Text(IterableDataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Any:
            while True:
                self.at += 1
                yield torch.randint(
                    0, 32, (9,), generator=torch.Generator().manual_seed(1000 * rank + self.at)
                )

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    return ParallelAwareDataloader(Text(), dp_rank=rank, dp_world_size=WORLD, batch_size=2)


def train(out: Path, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer import lr_scheduler, optimizer

    torch.manual_seed(3)
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(32, 8), out=nn.Linear(8, 32, bias=False)))
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    group = optimizer.ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})
    optimizers = optimizer.OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(
        model_parts=[model]
    )
    schedulers = lr_scheduler.LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=STEPS
    )
    data, state = loader(rank), State()
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=2, keep_latest_k=0),
        dataloader=data,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=str(out),
    )
    rows, batches = [], iter(data)
    for _ in range(STEPS):
        batch = next(batches)
        state.step += 1
        state.ntokens_seen += batch[:, 1:].numel()
        rate = schedulers.schedulers[0].get_last_lr()[0]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        rows.append({"step": state.step, "loss": loss.item(), "lr": rate})
        manager.save(state.step, last_step=state.step == STEPS)
    manager.close()
    if rank == 0:
        (out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def worker(rank: int, out: str, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    train(Path(out), rank)
    dist.destroy_process_group()


def main() -> None:
    import socket

    import torchtitan.components.checkpointer.dcp  # noqa: F401 - once, before the processes fork

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(worker, args=(sys.argv[1], port), nprocs=WORLD, start_method="fork")


if __name__ == "__main__":
    main()

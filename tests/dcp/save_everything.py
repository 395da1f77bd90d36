"""Writes small DCP checkpoints of every variant that people use, with two gloo processes: `python save_everything.py OUT`.

Every variant has a directory of its own with two saves of one training run (steps 2 and 4) and its metrics.jsonl.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 2
SAVES = (2, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 6)  # 33 rows on two ranks: an uneven shard
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)
        self.one = nn.Parameter(torch.ones(1))  # one rank holds nothing of it
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(x) + self.down(torch.relu(self.up(self.embed(x)))))
        return (hidden * self.one) @ self.embed.weight.T


def train(save: Any, out: Path, rank: int, *, shard: bool, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(7)
    model = Model().to(dtype)
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = torch.Generator().manual_seed(11 + rank)
    rows = []
    for step in range(1, max(SAVES) + 1):
        batch = torch.randint(0, 33, (2, 8), generator=data)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        rate = scheduler.get_last_lr()[0]
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rows.append({"step": step, "loss": loss.item(), "lr": rate})
        if step in SAVES:
            weights, moments = get_state_dict(model, optimizer)
            state = {
                "model": weights,
                "optimizer": moments,
                "lr_scheduler": scheduler.state_dict(),
                "train_state": {"step": step, "samples": step * 2 * WORLD},
                f"rng_{rank}": {"torch": torch.get_rng_state(), "python": random.getstate()},
            }
            save(state, out / f"save_{step}", step)
    if rank == 0:
        (out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def flat_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    """What StateDictOptions(flatten_optimizer_state_dict=True) makes of it: names joined by dots."""
    flat = {
        f"state.{name}.{key}": value
        for name, values in state["state"].items()
        for key, value in values.items()
    }
    for group in state["param_groups"]:
        for name in group["params"]:
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return flat


def variants(out: Path, rank: int) -> None:
    def plain(state: Any, path: Path, step: int) -> None:
        dcp.save(state, checkpoint_id=path)

    def threads(state: Any, path: Path, step: int) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=3))

    def many(state: Any, path: Path, step: int) -> None:
        dcp.save(
            state, storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=False, sync_files=False)
        )

    def alone(state: Any, path: Path, step: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        dcp.save(state, checkpoint_id=path, use_collectives=False)

    def tensors_only(state: Any, path: Path, step: int) -> None:
        dcp.save(
            {"model": state["model"]},
            storage_writer=dcp.FileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS),
        )

    def huggingface(state: Any, path: Path, step: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        dcp.save(
            dict(state["model"]),
            storage_writer=dcp.HuggingFaceStorageWriter(str(path), save_distributed=True),
        )

    def background(state: Any, path: Path, step: int) -> None:
        dcp.async_save(state, checkpoint_id=path).result()

    def compressed(state: Any, path: Path, step: int) -> None:
        from torch.distributed.checkpoint._extension import ZStandard

        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, _extensions=[ZStandard()]))

    def weights(state: Any, path: Path, step: int) -> None:
        dcp.save(state["model"], checkpoint_id=path)

    def flattened(state: Any, path: Path, step: int) -> None:
        dcp.save(
            {**state["model"], "optimizer": flat_optimizer(state["optimizer"]), "step": step},
            checkpoint_id=path,
        )

    for name, save, shard in (
        ("fsdp2", plain, True),
        ("replicated", plain, False),
        ("threads", threads, True),
        ("file-an-item", many, True),
        ("no-collectives", alone, True),
        ("background", background, True),
        ("compressed", compressed, True),
        ("safetensors", tensors_only, True),
        ("huggingface", huggingface, True),
        ("weights", weights, True),
        ("flattened", flattened, True),
    ):
        (out / name).mkdir(parents=True, exist_ok=True)
        train(save, out / name, rank, shard=shard)
        dist.barrier()


def worker(rank: int, out: str, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    variants(Path(out), rank)
    dist.destroy_process_group()


def main() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(worker, args=(sys.argv[1], port), nprocs=WORLD, start_method="fork")


if __name__ == "__main__":
    main()

"""Writes what verl and OpenRLHF write, with two CPU ranks: python rl_runs.py OUT RANK PORT [NAME...].

Neither is installed here: the files are made with the libraries that they use, as their checkpoint code does
(verl utils/checkpoint/fsdp_checkpoint_manager.py, OpenRLHF utils/deepspeed).
"""

from __future__ import annotations

import os
import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

OUT, RANK, PORT = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ |= {
    "RANK": str(RANK), "LOCAL_RANK": str(RANK), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT,
    "LOCAL_WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1",
}  # fmt: skip

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _ranks import leave  # noqa: E402

torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 11)
        self.down = torch.nn.Linear(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x.to(self.up.weight.dtype))))


def verl(name: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    roles = {}
    for role in ("actor", "critic"):
        torch.manual_seed(1)
        net = Net()
        for layer in (net.up, net.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        roles[role] = net, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1.0)
    for step in range(1, 5):
        for net, optimizer, scheduler in roles.values():
            for _ in range(3):  # mini-batches of one training step
                net(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        if step % 2 == 0:
            for role, (net, optimizer, scheduler) in roles.items():
                folder = OUT / name / f"global_step_{step}" / role
                (folder / "huggingface").mkdir(parents=True, exist_ok=True)
                ending = f"world_size_2_rank_{RANK}.pt"
                torch.save(net.state_dict(), folder / f"model_{ending}")
                torch.save(optimizer.state_dict(), folder / f"optim_{ending}")
                rng = {
                    "cpu": torch.get_rng_state(),
                    "numpy": np.random.get_state(),
                    "random": random.getstate(),
                }
                torch.save(
                    {"lr_scheduler": scheduler.state_dict(), "rng": rng}, folder / f"extra_state_{ending}"
                )
            torch.distributed.barrier()
            if RANK == 0:
                for role in roles:
                    (OUT / name / f"global_step_{step}" / role / "fsdp_config.json").write_text(
                        '{"FSDP_version": 2, "world_size": 2}'
                    )
                torch.save({"_num_yielded": step}, OUT / name / f"global_step_{step}" / "data.pt")
                (OUT / name / "latest_checkpointed_iteration.txt").write_text(str(step))


def openrlhf(name: str) -> None:
    import deepspeed

    # DeepSpeed compiles an operator behind a lock file: a test that was killed would make all later ones wait for ever.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    for role in ("_actor", "_critic"):
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=optimizer, lr_scheduler=schedule, config=config
        )
        for step in range(1, 5):
            engine.backward(engine(torch.randn(2, 6)).float().square().mean())
            engine.step()
            if step % 2 == 0:
                client = {
                    "episode": 0,
                    "global_step": step,
                    "total_consumed_prompts": step * 4,
                    "data_loader_state_dict": {"_num_yielded": step},
                }
                engine.save_checkpoint(str(OUT / name / role), tag=f"global_step{step}", client_state=client)


RUNS: dict[str, Any] = {"verl": verl, "openrlhf": openrlhf}

if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    for name in sys.argv[4:] or list(RUNS):
        RUNS[name](name)
    leave()

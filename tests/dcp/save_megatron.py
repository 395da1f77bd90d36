"""Saves a tiny training with megatron-core's dist_checkpointing on two tensor-parallel gloo ranks: `python save_megatron.py OUT`.

Writes the runs `torch_dist` (common.pt), `new-core` (the common state as an object among the items, as core 0.19 does it),
`bridge` (Megatron-Bridge's files around it), `nemo` (NeMo 2's folders around it) and `legacy` (a torch file for each rank).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WORLD = 2
STEPS = (2, 4)
BATCH = 8
WIDTH = 6


def make_args(step: int) -> argparse.Namespace:
    return argparse.Namespace(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=2, seq_length=8, global_batch_size=BATCH, micro_batch_size=4,
        tensor_model_parallel_size=WORLD, pipeline_model_parallel_size=1, expert_model_parallel_size=1, context_parallel_size=1,
        data_parallel_size=1, world_size=WORLD, consumed_train_samples=step * BATCH, iteration=step, fp16=False, bf16=False,
        rampup_batch_size=None, iterations_to_skip=[], params_dtype=torch.float32, no_save_optim=None, no_save_rng=None,
    )  # fmt: skip


class Training:
    """One tensor-parallel rank: the rows of an embedding and of a projection, a norm that all ranks hold."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(5 + rank)
        self.rank = rank
        self.model = nn.ModuleDict(
            {"embedding": nn.Embedding(16, WIDTH), "proj": nn.Linear(WIDTH, 16, bias=False)}
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.parameters = {
            "embedding.word_embeddings.weight": self.model["embedding"].weight,
            "output_layer.weight": self.model["proj"].weight,
            "decoder.final_layernorm.weight": self.norm.weight,
        }
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=self.rate(0))
        self.steps = 0

    @staticmethod
    def rate(samples: int) -> float:
        return (
            1e-2 * min(1.0, samples / (2 * BATCH))
            if samples <= 2 * BATCH
            else 1e-3 + (1e-2 - 1e-3) * (1 - (samples - 2 * BATCH) / (8 * BATCH))
        )

    def step(self) -> float:
        batch = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(self.steps))
        logits = self.model["proj"](self.norm(self.model["embedding"](batch[:, :-1])))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        dist.all_reduce(self.norm.weight.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.steps * BATCH)
        return loss.item()

    def rng(self) -> list[dict[str, Any]]:
        return [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "cuda_rng_state": torch.get_rng_state(),
                "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
            }
        ]

    def schedule(self) -> dict[str, Any]:
        return {
            "max_lr": 1e-2, "min_lr": 1e-3, "lr_warmup_steps": 2 * BATCH, "lr_decay_steps": 10 * BATCH, "lr_decay_style": "linear",
            "num_steps": self.steps * BATCH, "start_wd": 0.01, "end_wd": 0.01, "wd_incr_style": "constant", "wd_incr_steps": 100,
        }  # fmt: skip

    def groups(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]

    def common(self) -> dict[str, Any]:
        return {
            "args": make_args(self.steps),
            "checkpoint_version": 3.0,
            "iteration": self.steps,
            "optimizer": {
                "optimizer": {
                    "state": {"common_step": torch.tensor(float(self.steps))},
                    "param_groups": self.groups(),
                }
            },
            "opt_param_scheduler": self.schedule(),
            "num_floating_point_operations_so_far": 0,
        }

    def sharded(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        state: dict[str, Any] = {}

        def add(key: str, tensor: torch.Tensor) -> None:
            if "norm" in key:
                state[key] = ShardedTensor.from_rank_offsets(key, tensor, replica_id=self.rank)
            else:
                state[key] = ShardedTensor.from_rank_offsets(key, tensor, (0, self.rank, WORLD))

        for name, parameter in self.parameters.items():
            add(name, parameter.detach())
            moments = self.optimizer.state[parameter]
            add(f"optimizer.state.exp_avg.{name}", moments["exp_avg"])
            add(f"optimizer.state.exp_avg_sq.{name}", moments["exp_avg_sq"])
            add(f"optimizer.state.fp32_param.{name}", parameter.detach().clone())
        state["rng_state"] = ShardedObject("rng_state", self.rng(), (1, WORLD), (0, self.rank))
        return state


def save_torch_dist(training: Training, folder: Path, *, inside: bool = False) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    if training.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = training.sharded()
    common = training.common()
    if inside:
        state["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=training.rank)
    else:
        state.update(common)
    dist_checkpointing.save(state, str(folder))
    dist.barrier()
    if inside and training.rank == 0:
        (folder / "common.pt").unlink()
        (folder / "metadata.json").write_text(
            '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
        )


def save_legacy(training: Training, folder: Path) -> None:
    place = folder / f"mp_rank_{training.rank:02d}"
    place.mkdir(parents=True, exist_ok=True)
    state = {
        **training.common(),
        "model": {n: p.detach() for n, p in training.parameters.items()},
        "rng_state": training.rng(),
    }
    state["optimizer"] = {"optimizer": training.optimizer.state_dict()}
    torch.save(state, place / "model_optim_rng.pt")


def wrap_bridge(training: Training, saved: Path, folder: Path) -> None:
    """Megatron-Bridge puts its own files around what megatron-core wrote."""
    shutil.copytree(saved, folder)
    state = {
        "step": torch.tensor(training.steps),
        "consumed_train_samples": torch.tensor(training.steps * BATCH),
        "do_train": torch.tensor(True),
    }
    torch.save(state, folder / "train_state.pt")
    torch.save(state, folder.parent / "latest_train_state.pt")
    (folder / "run_config.yaml").write_text("model:\n  num_layers: 1\n")


def wrap_nemo(training: Training, saved: Path, root: Path) -> None:
    """NeMo 2 keeps Lightning's checkpoint as the common state, and puts folders around what megatron-core wrote."""
    samples = training.steps * BATCH
    folder = root / f"tiny--loss=3.1-step={training.steps - 1}-consumed_samples={samples}.0"
    shutil.copytree(saved, folder / "weights")
    common = {
        "epoch": 0, "global_step": training.steps, "pytorch-lightning_version": "2.4.0", "loops": {}, "callbacks": {},
        "optimizer": [training.common()["optimizer"]], "lr_schedulers": [training.schedule()],
        "PreTrainingDataModule": {"consumed_samples": samples},
    }  # fmt: skip
    torch.save(common, folder / "weights" / "common.pt")
    (folder / "context").mkdir()
    (folder / "context" / "io.json").write_text('{"root": 1}')
    (folder / "context" / "model.yaml").write_text("num_layers: 1\n")


def train(out: Path, rank: int) -> None:
    training, rows = Training(rank), []
    for _ in range(max(STEPS)):
        used = training.rate(training.steps * BATCH)
        loss = training.step()
        rows.append({"step": training.steps, "loss": loss, "lr": used})
        if training.steps in STEPS:
            name = f"iter_{training.steps:07d}"
            save_torch_dist(training, out / "torch_dist" / name)
            save_torch_dist(training, out / "new-core" / name, inside=True)
            save_legacy(training, out / "legacy" / name)
            if rank == 0:
                wrap_bridge(training, out / "torch_dist" / name, out / "bridge" / name)
                wrap_nemo(training, out / "torch_dist" / name, out / "nemo")
        dist.barrier()
    if rank == 0:
        for run in ("torch_dist", "new-core", "bridge", "legacy"):
            (out / run / "latest_checkpointed_iteration.txt").write_text(str(max(STEPS)))
            (out / run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def worker(rank: int, out: str, port: int) -> None:
    # megatron-core asks for the GPU before and after it writes, whether there is one or not.
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    train(Path(out), rank)
    dist.destroy_process_group()


def main() -> None:
    import socket

    import megatron.core.dist_checkpointing  # noqa: F401 - once, before the processes fork

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(worker, args=(sys.argv[1], port), nprocs=WORLD, start_method="fork")


if __name__ == "__main__":
    main()

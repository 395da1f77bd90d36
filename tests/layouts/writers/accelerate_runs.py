"""Writes accelerate `save_state` directories of many kinds: python accelerate_runs.py OUT RANK PORT [NAME...]; two CPU ranks."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

OUT, RANK, PORT = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ |= {
    "RANK": str(RANK), "LOCAL_RANK": str(RANK), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT,
    "LOCAL_WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1",
}  # fmt: skip

import torch  # noqa: E402 - accelerate looks at the environment when it is imported
from _ranks import leave  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, DistributedType, ProjectConfiguration  # noqa: E402

torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.norm = torch.nn.LayerNorm(10)
        self.down = torch.nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.dtype)
        return self.down(torch.relu(self.norm(self.up(x)))).float()


class Progress:
    """What a script registers to be saved."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def train(
    name: str,
    *,
    steps: int = 6,
    every: int = 2,
    accumulate: int = 2,
    sgd: bool = False,
    scheduled: bool = True,
    registered: bool = True,
    two_models: bool = False,
    named: str = "",
    stateful: bool = False,
    zero: int = 0,
    sharded: bool = False,
    **more: Any,
) -> None:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    torch.manual_seed(3)
    project = None if named else ProjectConfiguration(str(OUT / name), automatic_checkpoint_naming=True)
    loading = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true" if zero else "false"
    if zero:
        # DeepSpeed compiles an operator behind a lock file: a test that was killed would make all later ones wait for ever.
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        PartialState(cpu=True)  # makes it see both ranks, which on CPU it would not with DeepSpeed
        more |= {"deepspeed_plugin": deepspeed(zero), "mixed_precision": "bf16"}
    accelerator = Accelerator(
        cpu=not zero,
        gradient_accumulation_steps=accumulate,
        project_config=project,
        dataloader_config=loading,
        **more,
    )
    if sharded:
        # accelerate shards on accelerators only; its code runs on CPU ranks all the same.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = fsdp()
    net = Net()
    optimizer = (
        torch.optim.SGD(net.parameters(), lr=0.1) if sgd else torch.optim.AdamW(net.parameters(), lr=1e-2)
    )
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(256, 6), torch.randn(256, 3)), batch_size=4, shuffle=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s)) if scheduled else None
    parts = [p for p in (net, optimizer, data, schedule) if p is not None]
    prepared = accelerator.prepare(*parts)
    net, optimizer, data = prepared[:3]
    schedule = prepared[3] if scheduled else None
    if two_models:
        accelerator.prepare_model(Net())
    progress = Progress()
    if registered:
        accelerator.register_for_checkpointing(progress)
    while True:
        for x, y in data:
            with accelerator.accumulate(net):
                accelerator.backward(torch.nn.functional.mse_loss(net(x), y))
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            progress.step += 1
            if progress.step % every == 0:
                if sharded:
                    accelerator.state.distributed_type = DistributedType.FSDP
                accelerator.save_state(str(OUT / name / named.format(progress.step)) if named else None)
            if progress.step >= steps:
                accelerator.wait_for_everyone()
                return


def fsdp() -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True
    )


def deepspeed(stage: int) -> Any:
    from accelerate.utils import DeepSpeedPlugin

    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
    }  # fmt: skip
    return DeepSpeedPlugin(hf_ds_config=config)


RUNS: dict[str, Any] = {
    "two-ranks": lambda n: train(n),
    "no-scheduler": lambda n: train(n, scheduled=False, registered=False, named="step_{}"),
    "sgd": lambda n: train(n, sgd=True, registered=False),
    "bf16-loader": lambda n: train(n, mixed_precision="bf16", stateful=True),
    "two-models": lambda n: train(n, two_models=True, registered=False),
    "fsdp2": lambda n: train(n, sharded=True, accumulate=1),
    "zero2": lambda n: train(n, zero=2),
    "zero3": lambda n: train(n, zero=3, registered=False),
}

if __name__ == "__main__":
    for name in sys.argv[4:] or list(RUNS):
        RUNS[name](name)
    leave()

"""Writes DeepSpeed runs of many kinds with two CPU ranks: python deepspeed_runs.py OUT RANK PORT [NAME...]."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

OUT, RANK, PORT = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ |= {
    "RANK": str(RANK), "LOCAL_RANK": str(RANK), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT,
    "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1",
}  # fmt: skip

import deepspeed  # noqa: E402 - it looks at the environment when it is imported
import torch  # noqa: E402
from _ranks import leave  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402

torch.set_num_threads(1)

# DeepSpeed compiles an operator behind a lock file: a test that was killed would make all later ones wait for ever.
import_module("deepspeed.comm.torch").build_shm_op = lambda: None

# DeepSpeed asks for hardware that computes in half precision; torch does it on any CPU, slowly.
type(get_accelerator()).is_fp16_supported = lambda self: True


class Net(torch.nn.Module):
    def __init__(self, frozen: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 11)
        self.down = torch.nn.Linear(11, 8)
        self.head = torch.nn.Linear(8, 13, bias=False)
        self.register_buffer("seen", torch.zeros(3))
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.up.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(ids))
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return torch.nn.functional.cross_entropy(
            self.head(hidden).flatten(0, 1).float(), ids.roll(-1, 1).flatten()
        )


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **more,
    }


def train(
    name: str,
    stage: int,
    steps: int = 8,
    every: int = 4,
    *,
    net: Net | None = None,
    scheduler: str = "lambda",
    groups: bool = False,
    resume: str = "",
    client: bool = False,
    epoch_length: int = 0,
    lr: float = 1e-2,
    extra: dict[str, Any] | None = None,
    lightning: bool = False,
    **more: Any,
) -> None:
    torch.manual_seed(5)
    net = net or Net()
    trainable = [p for p in net.parameters() if p.requires_grad]
    if groups:
        wanted = [
            {"params": [p for p in trainable if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trainable if p.ndim < 2]},
        ]
    else:
        wanted = trainable
    optimizer = torch.optim.AdamW(wanted, lr=lr)
    schedule = None
    if scheduler == "lambda":
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=schedule, config=config(stage, **more, **(extra or {}))
    )
    by_hand = (
        torch.optim.lr_scheduler.StepLR(getattr(engine.optimizer, "optimizer", engine.optimizer), 1, 0.5)
        if scheduler == "epoch"
        else None
    )
    if resume:
        engine.load_checkpoint(str(OUT / resume))
    data = torch.Generator().manual_seed(RANK)
    while engine.global_steps < steps:
        for _ in range(2):
            ids = torch.randint(0, 13, (2, 6), generator=data)
            engine.backward(engine(ids))
            engine.step()
        if by_hand and epoch_length and engine.global_steps % epoch_length == 0:
            by_hand.step()
        if engine.global_steps % every == 0:
            state: dict[str, Any] = {}
            if client:
                state = {"step": engine.micro_steps, "epoch": 0, "torch_rng": torch.get_rng_state()}
            if by_hand:
                state["scheduler"] = by_hand.state_dict()
            if lightning:
                # What Lightning's DeepSpeedStrategy does, which itself asks for CUDA (strategies/deepspeed.py save_checkpoint).
                folder = OUT / name / f"epoch=0-step={engine.global_steps}.ckpt"
                engine.save_checkpoint(
                    str(folder), client_state=trainer_state(engine.global_steps), tag="checkpoint"
                )
                continue
            engine.save_checkpoint(str(OUT / name), client_state=state)
    deepspeed.comm.barrier()


def trainer_state(step: int) -> dict[str, Any]:
    """The rest of Lightning's checkpoint dictionary: all but weights, optimizers and schedulers."""
    done = {"total": {"ready": step, "completed": step}, "current": {"ready": step, "completed": step}}
    progress = {"optimizer": {"step": done, "zero_grad": {}}}
    loops = {"fit_loop": {"state_dict": {}, "epoch_loop.automatic_optimization.optim_progress": progress}}
    return {
        "epoch": 0, "global_step": step, "pytorch-lightning_version": "2.6.6", "loops": loops, "callbacks": {}, "lr_schedulers": [],
        "hparams_name": "kwargs", "hyper_parameters": {},
    }  # fmt: skip


def pipeline(name: str) -> None:
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [
        LayerSpec(torch.nn.Linear, 6, 10),
        torch.relu,
        LayerSpec(torch.nn.Linear, 10, 10),
        LayerSpec(torch.nn.Linear, 10, 4),
    ]
    net = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config(1, **BF16))
    generator = torch.Generator().manual_seed(1)

    def batches() -> Any:
        while True:
            yield (
                torch.randn(2, 6, generator=generator).bfloat16(),
                torch.randn(2, 4, generator=generator).bfloat16(),
            )

    data = batches()
    for step in range(1, 5):
        engine.train_batch(data_iter=data)
        if step % 2 == 0:
            engine.save_checkpoint(str(OUT / name))


def experts(name: str) -> None:
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    class Experts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(8, torch.nn.Linear(8, 8), num_experts=4, ep_size=2, k=1, use_residual=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden, loss, _ = self.moe(self.norm(self.embed(ids)))
            return (
                torch.nn.functional.cross_entropy(
                    self.head(hidden).flatten(0, 1).float(), ids.roll(-1, 1).flatten()
                )
                + 0.01 * loss
            )

    net = Experts()
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(net.parameters()), "name": "parameters"}
    )
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config(2, **BF16))
    for step in range(1, 5):
        for _ in range(2):
            engine.backward(engine(torch.randint(0, 13, (2, 6))))
            engine.step()
        if step % 2 == 0:
            engine.save_checkpoint(str(OUT / name))


def universal(name: str) -> None:
    """Convert a finished run with DeepSpeed's own tool, on one rank."""
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    train(name, 1, 4, **BF16)
    if RANK == 0:
        folder = OUT / name
        ds_to_universal.main(
            Namespace(
                input_folder=str(folder / "global_step4"), output_folder=str(folder / "global_step4_universal"), num_extract_workers=1,
                num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
            )
        )  # fmt: skip
    deepspeed.comm.barrier()


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 40, "loss_scale_window": 3, "hysteresis": 1}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}}}

RUNS: dict[str, Any] = {
    "zero0-fp32": lambda n: train(n, 0),
    "zero0-bf16": lambda n: train(n, 0, **BF16),
    "zero1-bf16": lambda n: train(n, 1, client=True, **BF16),
    "zero1-fp16": lambda n: train(n, 1, 24, 8, **FP16),
    "zero2-fp32-groups": lambda n: train(n, 2, groups=True, scheduler=""),
    "zero2-frozen": lambda n: train(n, 2, net=Net(frozen=True), **BF16),
    "zero2-tied": lambda n: train(n, 2, net=Net(tied=True), **BF16),
    "zero2-warmup": lambda n: train(n, 2, scheduler="", extra=WARMUP, **BF16),
    "zero2-epoch": lambda n: train(n, 2, scheduler="epoch", epoch_length=4, **BF16),
    "zero3-bf16": lambda n: train(n, 3, groups=True, **BF16),
    "zero3-frozen": lambda n: train(n, 3, net=Net(frozen=True), **BF16),
    "zero3-fp16": lambda n: train(n, 3, 24, 8, **FP16),
    "lightning": lambda n: train(n, 2, lightning=True, **BF16),
    "universal": universal,
    "experts": experts,
    "zero2-resumed": lambda n: (
        train(n, 2, 4, **BF16),
        train(n, 2, 8, resume=n, **{**BF16, "gradient_accumulation_steps": 1}),
        train(n, 2, 12, resume=n, **BF16),
    ),
    "pipeline": pipeline,  # the last: its process groups stay
}

if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    for name in sorted(sys.argv[4:] or RUNS, key=list(RUNS).index):
        RUNS[name](name)
    leave()

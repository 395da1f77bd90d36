"""Writes Trainer runs with two CPU ranks: python trainer_runs.py OUT RANK PORT [NAME...]."""

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
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

torch.set_num_threads(1)


class Text(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) * (i % 5 + 1)) % 29
        return {"input_ids": ids, "labels": ids}


def train(name: str, *, zero: int = 0, resume: bool = False, steps: int = 6, **more: Any) -> Trainer:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true" if zero else "false"
    torch.manual_seed(0)
    net = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=29,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
    )
    arguments: dict[str, Any] = {
        "output_dir": str(OUT / name), "max_steps": steps, "save_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "report_to": [], "disable_tqdm": True, "use_cpu": not zero, **more,
    }  # fmt: skip
    if zero:
        # DeepSpeed compiles an operator behind a lock file: a test that was killed would make all later ones wait for ever.
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        arguments["deepspeed"] = config(zero)
    settled = TrainingArguments(**arguments)
    if zero:
        # On CPU the Trainer with DeepSpeed takes itself for a single process; with accelerators it sees all.
        for name, value in (("num_processes", 2), ("process_index", RANK), ("local_process_index", RANK)):
            setattr(settled.distributed_state, name, value)
    trainer = Trainer(net, settled, train_dataset=Text())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def sharded(name: str) -> None:
    """The Trainer shards on accelerators only: its last checkpoint, with the folders that FSDP writes in place of two files."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    trainer = train(name)
    last = OUT / name / "checkpoint-6"
    model = trainer.accelerator.unwrap_model(trainer.model)
    torch.distributed.barrier()
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=last / "pytorch_model_fsdp_0")
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=last / "optimizer_0")
    if RANK == 0:
        for file in ("model.safetensors", "optimizer.pt"):
            (last / file).unlink()
    torch.distributed.barrier()


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
    }  # fmt: skip


RUNS: dict[str, Any] = {
    "two-ranks": lambda n: (train(n, steps=3), train(n, resume=True)),
    "fsdp": sharded,
    "zero2": lambda n: train(n, zero=2),
    "zero3": lambda n: train(n, zero=3),
}

if __name__ == "__main__":
    for name in sys.argv[4:] or list(RUNS):
        RUNS[name](name)
    leave()

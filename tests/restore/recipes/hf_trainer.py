"""A real Hugging Face training of a tiny model: `make_trainer` is the recipe, `train` what made the run."""

from __future__ import annotations

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.set_num_threads(1)
VOCAB, LENGTH = 16, 12


class Chain(torch.utils.data.Dataset):
    """Sequences of a Markov chain: there is something to learn."""

    def __init__(self) -> None:
        maker = torch.Generator().manual_seed(5)
        nearly = torch.eye(VOCAB).roll(1, 1) * 8 + 0.5
        tokens = [torch.zeros(64, dtype=torch.long)]
        for _ in range(LENGTH - 1):
            tokens.append(torch.multinomial(nearly[tokens[-1]], 1, generator=maker).flatten())
        self.data = torch.stack(tokens, 1)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, at: int) -> dict:
        return {"input_ids": self.data[at], "labels": self.data[at]}


def make_trainer(output: str = "out", logging_steps: int = 1, steps: int = 24) -> Trainer:
    arguments = TrainingArguments(
        output_dir=os.environ.get("TEST_OUTPUT", output),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        max_steps=steps,
        logging_steps=logging_steps,
        save_steps=5,
        save_total_limit=3,
        seed=7,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(1)
    return Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Chain())


def make_wider_trainer() -> Trainer:
    trainer = make_trainer()
    config = GPT2Config(**{**trainer.model.config.to_dict(), "n_embd": 24})
    return Trainer(model=GPT2LMHeadModel(config), args=trainer.args, train_dataset=trainer.train_dataset)


def make_trainer_sparse() -> Trainer:
    return make_trainer(logging_steps=5)


def make_lora_trainer() -> Trainer:
    from peft import LoraConfig, get_peft_model

    trainer = make_trainer()
    model = get_peft_model(trainer.model, LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1))
    return Trainer(model=model, args=trainer.args, train_dataset=trainer.train_dataset)

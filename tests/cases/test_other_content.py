"""Files that hold something else than their name says, and configs that do not fit the weights in any checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptguard.inspect import Options, audit
from ckptguard.model import Resume, Verdict


def newest(run: Path) -> tuple[Resume, set[str]]:
    (report,) = audit(str(run), Options(grace=0.0))
    verdict: Verdict = report.checkpoints[-1]
    return verdict.resume, {f.code for f in verdict.findings if f.loud}


@pytest.mark.hf
@pytest.mark.parametrize(
    ("holder", "held", "code"),
    [
        ("optimizer.pt", "scheduler.pt", "missing-optimizer"),
        ("scheduler.pt", "optimizer.pt", "missing-scheduler"),
        ("rng_state.pth", "scheduler.pt", "missing-rng"),
        ("optimizer.pt", "model.safetensors", "missing-optimizer"),
    ],
)
def test_trainer(holder: str, held: str, code: str, trainer_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trainer_run, tmp_path / "run", symlinks=True))
    folder = run / "checkpoint-30"
    if held.endswith("safetensors"):
        from safetensors.torch import load_file

        torch.save(load_file(folder / held), folder / holder)
    else:
        shutil.copy(folder / held, folder / holder)
    assert newest(run) == (Resume.LOSSY, {code})


@pytest.mark.parametrize(
    ("holder", "held", "code"),
    [
        ("optim.pt", "rng", "missing-optimizer"),
        ("sched.pt", "model", "missing-scheduler"),
        ("rng.pt", "optimizer", "missing-rng"),
    ],
)
def test_folders(holder: str, held: str, code: str, plain_run: Path, tmp_path: Path) -> None:
    names = {"model.pt": "model", "optim.pt": "optimizer", "sched.pt": "scheduler", "rng.pt": "rng"}
    for step in (10, 20, 30):
        state = torch.load(plain_run / f"ckpt_{step}.pt", weights_only=False)
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        for name, part in names.items():
            torch.save(state[held if step == 30 and name == holder else part], folder / name)
    resume, codes = newest(tmp_path)
    assert (resume, code in codes) == (Resume.LOSSY, True)


@pytest.mark.hf
def test_a_link_to_nothing(trainer_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trainer_run, tmp_path / "run", symlinks=True))
    (run / "checkpoint-30" / "optimizer.pt").unlink()
    os.symlink("/nowhere/optimizer.pt", run / "checkpoint-30" / "optimizer.pt")
    assert newest(run) == (Resume.UNSAFE, {"missing-file"})


@pytest.mark.hf
def test_rates_that_the_schedule_goes_out_from(trainer_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trainer_run, tmp_path / "run", symlinks=True))
    path = run / "checkpoint-30" / "scheduler.pt"
    state = torch.load(path, weights_only=False)
    state["base_lrs"] = [10 * rate for rate in state["base_lrs"]]
    torch.save(state, path)
    assert newest(run) == (Resume.LOSSY, {"lr-mismatch"})


def _families() -> list[tuple[str, Callable[[], Any], dict[str, Any]]]:
    import transformers as hf

    small = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    groups = {**small, "num_key_value_heads": 2, "max_position_embeddings": 24}
    return [
        ("llama", lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**groups)), {"intermediate_size": 64}),
        ("mistral", lambda: hf.MistralForCausalLM(hf.MistralConfig(**groups)), {"num_key_value_heads": 4}),
        ("qwen3", lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**groups, head_dim=16)), {"head_dim": 8}),
        ("gemma2", lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**groups, head_dim=16)), {"intermediate_size": 64}),
        ("bert", lambda: hf.BertForMaskedLM(hf.BertConfig(**small)), {"max_position_embeddings": 64}),
        ("roberta", lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**small)), {"intermediate_size": 64}),
        ("gpt2", lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=48, n_embd=32, n_head=4, n_layer=2)), {"n_positions": 64}),
    ]  # fmt: skip


@pytest.mark.hf
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "bert", "roberta", "gpt2"])
def test_a_config_of_other_widths(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make, changed = next((m, c) for n, m, c in _families() if n == family)
    make().save_pretrained(tmp_path / "export")
    config = tmp_path / "export" / "config.json"
    assert newest(tmp_path / "export") == (Resume.LOSSY, set())
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
    resume, codes = newest(tmp_path / "export")
    assert (resume, codes) == (Resume.UNSAFE, {"config-mismatch"})

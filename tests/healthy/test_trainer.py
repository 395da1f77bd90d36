"""The real Hugging Face Trainer in the variants that people use: no warning, no error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptguard.inspect import Options, audit, preflight
from ckptguard.model import Resume, RunReport

pytestmark = pytest.mark.hf

Dataset = list[dict[str, list[int]]]


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    return pytest.importorskip("transformers")


def tiny_model(**config: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(**{**options, "max_position_embeddings": 16, "tie_word_embeddings": False, **config})
    )


DATA: Dataset = [
    {"input_ids": [(3 * i + j) % 64 for j in range(12)], "labels": [(3 * i + j) % 64 for j in range(12)]}
    for i in range(48)
]


def train(folder: Path, model: Any = None, *, resume: str | bool = False, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = {
        "max_steps": 6,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_num_workers": 0,
        **options,
    }
    extra = {k: arguments.pop(k) for k in ("optimizers", "callbacks") if k in arguments}
    model = tiny_model() if model is None else model
    trainer = Trainer(
        model, TrainingArguments(str(folder), **arguments), train_dataset=DATA, eval_dataset=DATA[:8], **extra
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of a model this small would only wait for one another."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def quiet(folder: Path, expected: Resume = Resume.EXACT, steps: tuple[int, ...] = (2, 4, 6)) -> RunReport:
    (report,) = audit(str(folder), Options(grace=0.0))
    loud = [f"{v.path}: {f.code} {f.message}" for v in report.checkpoints for f in v.findings if f.loud]
    loud += [f"run: {f.code} {f.message}" for f in report.findings if f.loud]
    assert not loud, "\n".join(loud)
    assert [(v.step, v.resume) for v in report.checkpoints] == [(s, expected) for s in steps]
    assert preflight(str(folder), Options(grace=0.0)).resume_from == str(folder / f"checkpoint-{steps[-1]}")
    return report


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "gradient accumulation": lambda: {"gradient_accumulation_steps": 3},
    "bf16": lambda: {"bf16": True},
    "weights in bf16": lambda: {"model": tiny_model().bfloat16()},
    "epochs": lambda: {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 4},
    "plateau": lambda: {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"},
    "cosine": lambda: {"lr_scheduler_type": "cosine"},
    "constant, no warmup": lambda: {"lr_scheduler_type": "constant", "warmup_steps": 0},
    "adafactor": lambda: {"optim": "adafactor"},
    "sgd": lambda: {"optim": "sgd"},
    "tied weights": lambda: {"model": tiny_model(tie_word_embeddings=True)},
    "frozen embedding": lambda: {"model": _frozen(tiny_model())},
    "frozen all but the head": lambda: {"model": _frozen(tiny_model(), "layers", "norm", "embed")},
    "best at the end": lambda: {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss"},
    "label smoothing, no clipping": lambda: {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0},
    "sharded": lambda: {"model": _in_shards(tiny_model())},
}  # fmt: skip


def _frozen(model: Any, *names: str) -> Any:
    for name, parameter in model.named_parameters():
        if any(n in name for n in names or ("embed",)):
            parameter.requires_grad_(False)
    return model


def _in_shards(model: Any) -> Any:
    save = model.save_pretrained
    model.save_pretrained = lambda *a, **k: save(*a, **{**k, "max_shard_size": "20KB"})
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str, tmp_path: Path) -> None:
    options = VARIANTS[name]()
    train(tmp_path, **options)
    quiet(tmp_path, steps=(4, 8, 12) if name == "epochs" else (2, 4, 6))


def test_save_only_model_is_lossy_by_configuration(tmp_path: Path) -> None:
    train(tmp_path, save_only_model=True)
    report = quiet(tmp_path, Resume.LOSSY)
    assert all({"missing-optimizer"} <= {f.code for f in v.findings} for v in report.checkpoints)


def test_rotation_keeps_two(tmp_path: Path) -> None:
    train(tmp_path, save_total_limit=2)
    quiet(tmp_path, steps=(4, 6))


def test_a_resumed_run(tmp_path: Path) -> None:
    train(tmp_path, max_steps=4)
    train(tmp_path, max_steps=8, resume=True)
    (report,) = audit(str(tmp_path), Options(grace=0.0))
    loud = {f.code for v in report.checkpoints for f in v.findings if f.loud} | {
        f.code for f in report.findings if f.loud
    }
    assert not loud
    assert [v.step for v in report.checkpoints] == [2, 4, 6, 8]


def test_lora(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    train(tmp_path, model)
    quiet(tmp_path)


def test_an_optimizer_and_a_scheduler_of_ones_own(tmp_path: Path) -> None:
    import torch

    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train(tmp_path, model, optimizers=(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)))
    quiet(tmp_path)


def test_a_final_export_beside_the_checkpoints(tmp_path: Path) -> None:
    trainer = train(tmp_path)
    trainer.save_model()
    trainer.save_state()
    quiet(tmp_path)


@pytest.mark.parametrize(
    ("gone", "code", "resume"),
    [
        ("scheduler.pt", "missing-scheduler", Resume.LOSSY),
        ("optimizer.pt", "missing-optimizer", Resume.LOSSY),
        ("rng_state.pth", "missing-rng", Resume.LOSSY),
        ("trainer_state.json", "missing-trainer-state", Resume.UNSAFE),
        ("model.safetensors", "missing-model", Resume.UNSAFE),
    ],
)
def test_what_is_taken_away_is_named(
    gone: str, code: str, resume: Resume, trained: Path, tmp_path: Path
) -> None:
    import shutil

    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "checkpoint-6" / gone).unlink()
    (report,) = audit(str(run), Options(grace=0.0))
    newest = report.checkpoints[-1]
    assert (newest.resume, code in {f.code for f in newest.findings if f.loud}) == (resume, True)
    assert preflight(str(run), Options(grace=0.0)).resume_from == str(run / "checkpoint-4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder)
    return folder


def test_experts_that_are_one_tensor_in_training(tmp_path: Path) -> None:
    """On disk each expert has matrices of its own; the optimizer's states are of all experts together."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=16,
    )  # fmt: skip
    train(tmp_path, MixtralForCausalLM(config))
    quiet(tmp_path)


def test_a_restart_that_draws_anew(tmp_path: Path) -> None:
    """No step of this model draws; only the beginning of the second attempt did, in the middle of an epoch."""
    train(tmp_path, max_steps=4)
    train(tmp_path, max_steps=8, resume=True, ignore_data_skip=True)
    (report,) = audit(str(tmp_path), Options(grace=0.0))
    assert not [f.code for v in report.checkpoints for f in v.findings if f.loud]

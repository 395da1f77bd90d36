"""K6: names of weights, tied and empty tensors, adapters, vocabularies, exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptguard.testing_cases import Case, at, each
from ckptguard.testing_damage import edit_json, edit_weights, resave

Holds = Callable[[Case, Path], list[str]]
ALL = "checkpoint-*/model.safetensors"
NEW = "checkpoint-30/model.safetensors"
WTE, HEAD = "transformer.wte.weight", "lm_head.weight"


def prefixed(prefix: Callable[[str], str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {prefix(name): t for name, t in weights.items()}


def model(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    """Change the model in a plain loop's file."""

    def make(state: dict[str, Any]) -> None:
        changed = change(state["model"])
        if changed is not None:
            state["model"] = changed

    return make


def mixed_prefixes(name: str) -> str:
    if ".0." in name:
        return f"_orig_mod.module.{name}"
    return f"module._orig_mod.{name}" if ".1." in name else name


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {new if n == old else n: t for n, t in weights.items()}


def adapters(names: tuple[str, ...] = ("",)) -> Callable[[Path], None]:
    """A run of adapters, as PEFT saves it: no model file, moments of the adapters alone."""

    def make(run: Path) -> None:
        for step in (10, 20, 30):
            adapter(run / f"checkpoint-{step}", step)

    return make


def adapter(folder: Path, step: int, scale: float = 1.0, extra: str = "") -> None:
    from safetensors.torch import save_file

    for name in ("model.safetensors", "config.json", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    torch.manual_seed(step)
    tensors = {}
    for layer in range(3):
        base = f"base_model.model.transformer.h.{layer}.attn.c_attn"
        for tail in ("", *([extra] if extra else [])):
            tensors[f"{base}.lora_A{tail}.weight"] = torch.full((4, 16), 0.1) + 0.01 * torch.randn(4, 16)
            tensors[f"{base}.lora_B{tail}.weight"] = scale * torch.randn(48, 4) * 0.05 * step
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": 4,
                "base_model_name_or_path": "gpt2",
                "target_modules": ["c_attn"],
                "modules_to_save": None,
            }
        )
    )

    def moments(state: dict[str, Any]) -> None:
        state["state"] = {
            i: {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.randn(t.shape) * 1e-3,
                "exp_avg_sq": torch.rand(t.shape) * 1e-6,
            }
            for i, t in enumerate(tensors.values())
        }
        state["param_groups"] = [
            {**state["param_groups"][0], "params": list(range(len(tensors)))},
            {**state["param_groups"][1], "params": []},
        ]

    resave(folder / "optimizer.pt", moments)


def extra_state(state: dict[str, Any]) -> None:
    state["model"]["layers.0._extra_state"] = torch.empty(0, dtype=torch.uint8)
    state["model"]["layers.1._extra_state"] = None


def padded(rows: int) -> Callable[[Path], None]:
    """An embedding with so many rows for a vocabulary of 32, the optimizer's state with it."""

    def make(run: Path) -> None:
        for step in (10, 20, 30):
            folder = run / f"checkpoint-{step}"

            def grow(t: torch.Tensor) -> torch.Tensor:
                return t[:rows] if rows < len(t) else torch.cat([t, t[: rows - len(t)]])

            edit_weights(folder / "model.safetensors", lambda w: w.update({WTE: grow(w[WTE])}))

            def moments(state: dict[str, Any]) -> None:
                for values in state["state"].values():
                    for key in ("exp_avg", "exp_avg_sq"):
                        if values[key].shape == (32, 16):
                            values[key] = grow(values[key])

            resave(folder / "optimizer.pt", moments)

    return make


def tokenizer(ids: int) -> Callable[[Path], None]:
    vocab = {f"t{i}": i for i in range(ids)}
    text = json.dumps(
        {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    )

    def make(run: Path) -> None:
        for step in (10, 20, 30):
            (run / f"checkpoint-{step}/tokenizer.json").write_text(text)

    return make


def emptied(weights: dict[str, Any]) -> None:
    for name, t in weights.items():
        if t.dim() == 2 and ".0." not in name:
            weights[name] = torch.empty(0)


def grown_buffer(rows: int) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.update({"scratch": torch.ones(rows, 4)})


TRAINER = [
    Case("B56 torch.compile's prefix everywhere", at(ALL, edit_weights, prefixed("_orig_mod.{}".format)), {f"checkpoint-{n}": "lossy|unsafe names-changed" for n in (10, 20, 30)}, None, safe="checkpoint-30"),
    Case("B56 torch.compile's prefix in the newest", at(NEW, edit_weights, prefixed("_orig_mod.{}".format)), {"checkpoint-30": "lossy|unsafe names-changed config-mismatch? missing-tensor?"}, "checkpoint-20", safe="checkpoint-30"),
    Case("B56 DDP's prefix in the first", at("checkpoint-10/model.safetensors", edit_weights, prefixed("module.{}".format)), {"checkpoint-10": "lossy|unsafe names-changed"}, "checkpoint-30"),
    Case("B57 nested prefixes on some", at(NEW, edit_weights, prefixed(mixed_prefixes)), {"checkpoint-30": "lossy|unsafe names-changed config-mismatch? missing-tensor?"}, "checkpoint-20", safe="checkpoint-30"),
    Case("B60 adapters only [TRAP]", adapters(), {}, "checkpoint-30"),
    Case("B61 the adapter was initialised again", each(adapters(), lambda run: adapter(run / "checkpoint-30", 30, 0.0005)), {"checkpoint-30": "lossy|exact weight-jump"}, "checkpoint-20|checkpoint-30", safe="checkpoint-30"),
    Case("B62 a second adapter", each(adapters(), lambda run: adapter(run / "checkpoint-30", 30, extra=".default_1")), {"checkpoint-30": "lossy|unsafe names-changed"}, "checkpoint-20", safe="checkpoint-30"),
    Case("B63 tied: the head stored, the embedding not", at(ALL, edit_weights, renamed(WTE, HEAD)), {f"checkpoint-{n}": "lossy missing-tensor" for n in (10, 20, 30)}, None, safe="checkpoint-30"),
    Case("B63 tied: neither", at(NEW, edit_weights, lambda w: w.__delitem__(WTE)), {"checkpoint-30": "unsafe missing-tensor shape-mismatch?"}, "checkpoint-20"),
    Case("B64 tied: stored once [TRAP]", each(), {}, "checkpoint-30"),
    Case("B64 tied: stored twice [TRAP]", at(ALL, edit_weights, lambda w: w.update({HEAD: w[WTE]})), {}, "checkpoint-30"),
    Case("not tied, and the head gone", each(at("checkpoint-*/config.json", edit_json, lambda c: c.update(tie_word_embeddings=False))), {f"checkpoint-{n}": "unsafe missing-tensor" for n in (10, 20, 30)}, None, run="no-safe-checkpoint"),
    Case("B71 a padded vocabulary [TRAP]", each(padded(64), tokenizer(31)), {}, "checkpoint-30"),
    Case("B71 a few tokens added [TRAP]", each(padded(34), tokenizer(34)), {}, "checkpoint-30"),
    Case("B71 fewer rows than ids", each(padded(28), tokenizer(32)), {f"checkpoint-{n}": "unsafe|lossy config-mismatch tokenizer-mismatch" for n in (10, 20, 30)}, None, run="no-safe-checkpoint?"),
    Case("B72 an export of empty parameters", at(NEW, edit_weights, emptied), {"checkpoint-30": "unsafe shape-mismatch|missing-tensor|config-mismatch names-changed?"}, "checkpoint-20"),
    Case("B72 empty parameters everywhere", at(ALL, edit_weights, emptied), {f"checkpoint-{n}": "unsafe shape-mismatch|missing-tensor|config-mismatch" for n in (10, 20, 30)}, None, run="no-safe-checkpoint"),
    Case("B90 bf16 from a resume on", each(*(at(f"checkpoint-{n}/model.safetensors", edit_weights, lambda w: {k: t.bfloat16() for k, t in w.items()}) for n in (20, 30))), {"checkpoint-20": "lossy dtype-mismatch"}, "checkpoint-30"),
    Case("bf16 throughout [TRAP]", at(ALL, edit_weights, lambda w: {k: t.bfloat16() for k, t in w.items()}), {}, "checkpoint-30"),
]  # fmt: skip

PLAIN = [
    Case("B56 prefix in the newest", at("ckpt_30.pt", resave, model(prefixed("_orig_mod.{}".format))), {"ckpt_30.pt": "lossy names-changed"}, "ckpt_20.pt", safe="ckpt_30.pt"),
    Case("B56 prefix from the second on", each(*(at(f"ckpt_{n}.pt", resave, model(prefixed("module.{}".format))) for n in (20, 30))), {"ckpt_20.pt": "lossy names-changed"}, "ckpt_30.pt"),
    Case("B56 prefix throughout a loop by hand [TRAP]", at("ckpt_*.pt", resave, model(prefixed("module.{}".format))), {}, "ckpt_30.pt"),
    Case("B57 a real sub-module called module [TRAP]", at("ckpt_*.pt", resave, model(prefixed("net.module.{}".format))), {}, "ckpt_30.pt"),
    Case("B57 nested prefixes on some", at("ckpt_30.pt", resave, model(prefixed(mixed_prefixes))), {"ckpt_30.pt": "lossy names-changed"}, "ckpt_20.pt", safe="ckpt_30.pt"),
    Case("B67 FP8 bookkeeping, empty [TRAP]", at("ckpt_*.pt", resave, extra_state), {}, "ckpt_30.pt"),
    Case("B67 FP8 bookkeeping that comes [TRAP]", at("ckpt_30.pt", resave, extra_state), {}, "ckpt_30.pt"),
    Case("B67 FP8 bookkeeping that goes [TRAP]", each(at("ckpt_10.pt", resave, extra_state), at("ckpt_20.pt", resave, extra_state)), {}, "ckpt_30.pt"),
    Case("B70 a scratch buffer of another batch", each(at("ckpt_10.pt", resave, model(grown_buffer(8))), at("ckpt_20.pt", resave, model(grown_buffer(8))), at("ckpt_30.pt", resave, model(grown_buffer(16)))), {"ckpt_30.pt": "lossy|unsafe shape-mismatch@scratch"}, "ckpt_20.pt", safe="ckpt_30.pt"),
    Case("B72 an export of empty parameters", at("ckpt_30.pt", resave, model(emptied)), {"ckpt_30.pt": "unsafe shape-mismatch|missing-tensor"}, "ckpt_20.pt", run="pointer-to-unsafe"),
    Case("a tensor lost in the newest", at("ckpt_30.pt", resave, model(lambda m: m.__delitem__("layers.1.up.weight"))), {"ckpt_30.pt": "unsafe missing-tensor shape-mismatch?"}, "ckpt_20.pt", run="pointer-to-unsafe"),
    Case("a tensor lost in the first", at("ckpt_10.pt", resave, model(lambda m: m.__delitem__("layers.1.up.weight"))), {"ckpt_10.pt": "unsafe missing-tensor|shape-mismatch"}, "ckpt_30.pt"),
]  # fmt: skip


@pytest.mark.parametrize("case", TRAINER, ids=str)
def test_trainer(case: Case, holds: Holds, trainer_run: Path) -> None:
    assert holds(case, trainer_run) == []


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_loop(case: Case, holds: Holds, plain_run: Path) -> None:
    assert holds(case, plain_run) == []

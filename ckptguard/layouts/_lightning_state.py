"""What Lightning's Trainer keeps in a checkpoint dictionary (pytorch_lightning checkpoint_connector.py, 2.6)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckptguard.formats.text import as_object
from ckptguard.layouts._state import EMA_NAME, Builder, integer, is_optimizer, is_scaler, is_weights, items

VERSION = "pytorch-lightning_version"
OWN_KEYS = frozenset(
    {
        "epoch", "global_step", VERSION, "state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers", "hparams_name",
        "hyper_parameters", "datamodule_hyper_parameters", "datamodule_hparams_name", "current_model_state", "averaging_state",
        "native_amp_scaling_state", "amp_scaling_state", "hparams_type",
    }
)  # fmt: skip
GAPS = ("rng", "dataloader")
CARRIES = frozenset({"model", "optimizer", "scheduler"})


def holds(tree: Any) -> bool:
    """Whether a torch file's content is what Lightning's Trainer saves."""
    return isinstance(tree, dict) and VERSION in tree and ("state_dict" in tree or "loops" in tree)


def interpret_tree(builder: Builder, tree: Mapping[str, Any], file: str) -> None:
    """Everything in a Lightning checkpoint dictionary, into common terms."""
    builder.layout = "lightning"
    _add_weights(builder, tree, file)
    add_trainer(builder, tree, file)


def add_trainer(builder: Builder, tree: Mapping[str, Any], file: str) -> None:
    """All but the weights: what `meta.pt` of a sharded checkpoint and DeepSpeed's client state hold too."""
    for place, optimizer in enumerate(_list(tree.get("optimizer_states"))):
        if is_optimizer(optimizer):
            builder.add_optimizer(optimizer, file, name=f"optimizer_states.{place}")
    for scheduler in _list(tree.get("lr_schedulers")):
        if isinstance(scheduler, dict):
            builder.add_scheduler(scheduler, file)
    for key, value in tree.items():
        if (key not in OWN_KEYS and is_scaler(value)) or (
            key in ("native_amp_scaling_state", "amp_scaling_state") and isinstance(value, dict)
        ):
            builder.add_scaler(value, file)
    _add_callbacks(builder, as_object(tree.get("callbacks")), file)
    _add_loaders(builder, tree, file)
    _add_progress(builder, tree, file)
    _mark_absent(builder, tree)


def _add_weights(builder: Builder, tree: Mapping[str, Any], file: str) -> None:
    weights = as_object(tree.get("state_dict"))
    raw = tree.get("current_model_state")
    if is_weights(raw):
        # The averaging callback swaps them: state_dict holds the average, the optimizer belongs to the raw ones.
        builder.add_model(raw, file)
        builder.add_ema(
            {**weights, "n_averaged": as_object(tree.get("averaging_state")).get("n_averaged")}, file
        )
    else:
        builder.add_model(weights, file)


def _add_callbacks(builder: Builder, callbacks: Mapping[str, Any], file: str) -> None:
    for name, state in callbacks.items():
        for key, value in items(state).items():
            if is_weights(value) and (EMA_NAME.search(str(key)) or EMA_NAME.search(str(name))):
                builder.add_ema(value, file)


def _add_loaders(builder: Builder, tree: Mapping[str, Any], file: str) -> None:
    """States of loaders that keep one: in the fit loop, or the data module's own."""
    fit = as_object(as_object(tree.get("loops")).get("fit_loop"))
    for rank, state in enumerate(_list(as_object(fit.get("state_dict")).get("combined_loader"))):
        if isinstance(state, dict) and state:
            builder.add_loader(state, file, rank=None if rank == 0 else rank)


def _add_progress(builder: Builder, tree: Mapping[str, Any], file: str) -> None:
    step, epoch = integer(tree.get("global_step")), integer(tree.get("epoch"))
    # Before 1.6 the trainer saved the number of the step to come.
    old = str(tree.get(VERSION, "")).split(".")[:2] in (["1", str(n)] for n in range(6)) or str(
        tree.get(VERSION, "")
    ).startswith("0.")
    builder.add_counter("global_step", step, file, "unknown" if old else "step")
    builder.add_counter("epoch", epoch, file, "epoch")
    builder.step = builder.step if step is None or old else step
    fit = as_object(as_object(tree.get("loops")).get("fit_loop"))
    counted = list(_optimizer_steps(fit))
    if step is not None and counted and step not in (max(counted), sum(counted)) and not old:
        builder.problem(
            file,
            "step-mismatch",
            "loops.fit_loop",
            f"global_step is {step}, the loops count {max(counted)} optimizer steps: parts of two checkpoints",
        )
    if not fit and builder.optimizers and re.match(r"[2-9]\.", str(tree.get(VERSION, ""))):
        builder.problem(
            file,
            "missing-trainer-state",
            "loops",
            "it holds no progress of the loops: epochs and batches would be counted from the beginning",
        )
    batches = _batches(fit)
    by_hand = _at(fit, "epoch_loop.manual_optimization.optim_step_progress", "total", "completed")
    if (
        step is not None
        and batches is not None
        and step > batches > 0
        and not by_hand
        and not old
        and len(builder.optimizers) == 1
    ):
        builder.problem(
            file,
            "step-mismatch",
            "loops.fit_loop",
            f"global_step is {step}, the loops have had {batches} batches, each of which makes one step at most",
        )
    if fit:
        builder.attributes["lightning_progress"] = {
            "batches": _at(fit, "epoch_loop.batch_progress", "current", "ready"),
            "epochs": _at(fit, "epoch_progress", "current", "completed"),
        }


def _batches(fit: Mapping[str, Any]) -> int | None:
    """How many batches there were: the last one may be done and not yet counted as completed."""
    counts = [
        _at(fit, "epoch_loop.batch_progress", "total", kind) for kind in ("ready", "processed", "completed")
    ]
    known = [n + (place == 2) for place, n in enumerate(counts) if n is not None]
    return min(known, default=None)


def _optimizer_steps(fit: Mapping[str, Any]) -> Iterator[int]:
    """Steps by the loop's own count: of the automatic optimization, and of one done by hand."""
    for path in (
        ("epoch_loop.automatic_optimization.optim_progress", "optimizer", "step", "total", "completed"),
        ("epoch_loop.manual_optimization.optim_step_progress", "total", "completed"),
    ):
        found = _at(fit, *path)
        if found is not None:
            yield found


def _at(tree: Mapping[str, Any], *path: str) -> int | None:
    here: Any = tree
    for part in path:
        here = as_object(here).get(part)
    return integer(here)


def _mark_absent(builder: Builder, tree: Mapping[str, Any]) -> None:
    """What the file itself says was not to be saved, or never existed."""
    if VERSION in tree and not {"optimizer_states", "lr_schedulers"} & tree.keys() and not builder.optimizers:
        builder.attributes["model_only"] = True  # save_weights_only
    groups = [g for o in builder.optimizers for g in o.groups]
    if groups and not builder.schedulers and not any("initial_lr" in g.options for g in groups):
        builder.components["scheduler"] = None  # none ever touched the optimizer


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

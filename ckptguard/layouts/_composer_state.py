"""What Composer's Trainer keeps in a checkpoint (composer core/state.py, core/time.py, utils/checkpoint.py, 0.33)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptguard.formats.text import as_object
from ckptguard.layouts._state import EMA_NAME, Builder, integer, is_optimizer, is_weights, items

GAPS = ("dataloader",)
CARRIES = frozenset({"model", "optimizer", "scheduler", "rng"})
NAME = re.compile(r"ep(?P<epoch>\d+)-ba(?P<batch>\d+)")


def holds(tree: Any) -> bool:
    """Whether a torch file's content is what Composer's Trainer saves."""
    state = tree.get("state") if isinstance(tree, dict) else None
    return isinstance(state, dict) and (
        "timestamp" in state or "composer_env_info" in as_object(state.get("metadata"))
    )


def interpret_tree(builder: Builder, tree: Mapping[str, Any], file: str) -> None:
    """Everything in a Composer checkpoint, into common terms."""
    builder.layout = "composer"
    state = as_object(tree.get("state"))
    model = state.get("model")
    if isinstance(model, dict):
        builder.add_model(model, file)
    for name, optimizer in as_object(state.get("optimizers")).items():
        if is_optimizer(optimizer):
            builder.add_optimizer(optimizer, file, name=str(name))
    for scheduler in as_object(state.get("schedulers")).values():
        if isinstance(scheduler, dict):
            builder.add_scheduler(scheduler, file)
    scaler = state.get("scaler")
    for value in as_object(scaler).values() if scaler else ():
        if isinstance(value, dict) and value:
            builder.add_scaler(value, file)
    train = as_object(state.get("dataset_state")).get("train")
    if train:
        builder.add_loader(dict(items(train)) or {"position": train}, file)
    for pair in state.get("algorithms") or ():
        _add_algorithm(builder, pair, file)
    _add_time(builder, state, file)
    _add_ranks(builder, tree, state, file)
    if model is not None and "timestamp" not in state:
        builder.attributes["model_only"] = True  # save_weights_only
    if (
        builder.optimizers
        and not builder.schedulers
        and not any("initial_lr" in g.options for o in builder.optimizers for g in o.groups)
    ):
        builder.components["scheduler"] = None


def _add_algorithm(builder: Builder, pair: Any, file: str) -> None:
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not EMA_NAME.search(str(pair[0])):
        return
    for value in items(pair[1]).values():
        inner = value if is_weights(value) else as_object(value).get("named_parameters_dict")
        if is_weights(inner):
            builder.add_ema(inner, file)


def _add_time(builder: Builder, state: Mapping[str, Any], file: str) -> None:
    stamp = as_object(state.get("timestamp"))
    stamp = as_object(stamp.get("Timestamp", stamp))
    batch = integer(stamp.get("batch"))
    builder.add_counter("timestamp.batch", batch, file)
    builder.add_counter("timestamp.epoch", stamp.get("epoch"), file, "epoch")
    builder.add_counter("timestamp.sample", stamp.get("sample"), file, "samples")
    builder.step = batch if builder.step is None else builder.step
    named, epoch = NAME.search(builder.manifest.path.rpartition("/")[2]), integer(stamp.get("epoch"))
    if named and epoch is not None and int(named["epoch"]) != epoch:
        builder.problem(
            file,
            "step-mismatch",
            "state.timestamp",
            f"the name says epoch {int(named['epoch'])}, the content epoch {epoch}",
        )


def _add_ranks(builder: Builder, tree: Mapping[str, Any], state: Mapping[str, Any], file: str) -> None:
    world = integer(as_object(state.get("metadata")).get("world_size"))
    if world:
        builder.topology["world_size"] = world
    rngs = tree.get("rng")
    if isinstance(rngs, dict):
        rngs = list(rngs.values())
    for rank, streams in enumerate(rngs if isinstance(rngs, list | tuple) else ()):
        if isinstance(streams, dict):
            builder.add_rng({str(k): v for k, v in streams.items()}, file, rank)
    if world and builder.rngs and len(builder.rngs) != world:
        builder.problem(
            file,
            "missing-rank" if len(builder.rngs) < world else "topology-mismatch",
            "rng",
            f"it holds the RNG states of {len(builder.rngs)} ranks, and says that {world} took part",
            severity="warning",
            effect="lossy",
        )

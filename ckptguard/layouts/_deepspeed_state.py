"""What the files of a DeepSpeed tag hold, in common terms: ZeRO 0 to 3, pipeline, experts, universal.

Sources: deepspeed 0.19 runtime/engine.py, runtime/zero/{stage_1_and_2,stage3}.py, runtime/bf16_optimizer.py,
runtime/fp16/{fused_optimizer,loss_scaler}.py, utils/zero_to_fp32.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptguard.formats.text import as_object
from ckptguard.layouts._deepspeed_files import EXPERT, LAYER, MODEL, OPTIMIZER, SHARDED_MODEL, UNIVERSAL
from ckptguard.layouts._deepspeed_progress import add_progress, add_topology
from ckptguard.layouts._deepspeed_universal import add_universal, compare_universal
from ckptguard.layouts._deepspeed_zero import (
    Shard,
    add_masters,
    add_padding,
    add_partitions,
    add_rank_parts,
    read_shard,
    recorded_shapes,
)
from ckptguard.layouts._ranks import REPLICAS, replicas
from ckptguard.layouts._state import Builder, integer, is_optimizer, items, scalar
from ckptguard.model import FileFacts, ManifestFile, Tensor


def add_tag(
    builder: Builder, members: Sequence[ManifestFile], files: Mapping[str, FileFacts], prefix: str = ""
) -> None:
    """Everything that a tag directory holds. `prefix` is where it lies inside the checkpoint ("global_step20/")."""
    trees = {f.name.removeprefix(prefix): _tree(files, f.name) for f in members if f.name.startswith(prefix)}
    models = {
        n: t for n, t in trees.items() if (MODEL.match(n) or SHARDED_MODEL.match(n)) and isinstance(t, dict)
    }
    head = next(iter(models.values()), {})
    shards = [
        s
        for n, t in sorted(trees.items())
        if OPTIMIZER.match(n) and (s := read_shard(prefix + n, n, t)) is not None
    ]
    config = as_object(head.get("ds_config"))
    stage = (
        shards[0].stage if shards else integer(as_object(config.get("zero_optimization")).get("stage")) or 0
    )
    for name, tree in sorted(models.items()):
        _add_model_file(builder, prefix + name, name, tree, several=_several(models))
    layers = {int(m["layer"]): n for n in trees if (m := LAYER.match(n))}
    if layers:
        _compare_layers(builder, prefix, models, layers, trees)
    for name, tree in sorted(trees.items()):
        _add_layer_file(builder, prefix + name, name, tree)
    builder.attributes[REPLICAS] = replicas(
        (name.partition("@mp")[0], builder.subjects[id(tensor)].partition(":")[0], tensor)
        for name, tensor in builder.model.items()
    )
    for shard in shards:
        _add_shard(builder, shard, several=len({s.mp for s in shards}) > 1)
    if any(name.startswith(f"{UNIVERSAL}/") for name in trees):
        add_universal(builder, prefix, trees)
        compare_universal(builder, prefix, models, trees)
    elif stage == 3:
        _add_virtual_weights(builder, models, shards)
        add_padding(builder, models, shards)
    add_partitions(builder, models, shards)
    if (integer(as_object(config.get("zero_optimization")).get("mics_shard_size")) or 0) <= 0:
        add_rank_parts(builder, shards)  # MiCS keeps the same partition in several groups of ranks
    if stage < 3:
        add_masters(builder, models, shards, prefix)
    add_progress(builder, prefix, models, head, config, shards)
    add_topology(builder, members, prefix, models, head, shards, stage)


# --- weights ------------------------------------------------------------------------------------------


def _several(models: Mapping[str, Any]) -> bool:
    return len({m["mp"] for n in models if (m := MODEL.match(n))}) > 1


def _add_model_file(builder: Builder, file: str, name: str, tree: Mapping[str, Any], several: bool) -> None:
    module = tree.get("module")
    match = MODEL.match(name)
    if match and isinstance(module, dict):
        _add_weights(builder, module, file, f"@mp{int(match['mp'])}" if several else "")
        _compare_with_shapes(builder, tree, module, file)
    optimizer = tree.get("optimizer")
    if isinstance(optimizer, dict):
        _add_plain_optimizer(builder, optimizer, file)


def _add_weights(
    builder: Builder, tensors: Mapping[str, Any], file: str, suffix: str = "", prefix: str = ""
) -> None:
    for key, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            if suffix:
                tensor.local_of = (
                    f"{prefix}{key}"  # a slice by tensor parallelism, or another pipeline stage's
                )
            builder.model[f"{prefix}{key}{suffix}"] = tensor
            builder.mark(tensor, file)


def _compare_with_shapes(
    builder: Builder, tree: Mapping[str, Any], module: Mapping[str, Any], file: str
) -> None:
    """Every parameter that the optimizer holds must be among the weights, with the same shape."""
    shared = as_object(tree.get("shared_params"))
    for name, shape in recorded_shapes(tree):
        found = module.get(name)
        if not isinstance(found, Tensor):
            if name not in shared and shared.get(name) is None and "expert" not in name and module:
                builder.problem(
                    file,
                    "missing-tensor",
                    f"module.{name}",
                    f"the optimizer holds {name}, the weights do not",
                )
        elif tuple(found.shape) != shape:
            builder.problem(
                file,
                "shape-mismatch",
                f"module.{name}",
                f"{name} has the shape {list(found.shape)}, the optimizer's record of it says {list(shape)}",
            )


def _add_layer_file(builder: Builder, file: str, name: str, tree: Any) -> None:
    if not isinstance(tree, dict):
        return
    if match := LAYER.match(name):
        suffix = f"@mp{int(match['mp'])}" if int(match["mp"] or 0) else ""
        _add_weights(builder, tree, file, suffix, prefix=f"{int(match['layer'])}.")
    elif EXPERT.match(name):
        _add_weights(builder, tree, file)


def _compare_layers(
    builder: Builder,
    prefix: str,
    models: Mapping[str, Any],
    layers: Mapping[int, str],
    trees: Mapping[str, Any],
) -> None:
    """A pipeline's weights lie in a file a layer; which layers have any shows in what the optimizer holds."""
    like = next(iter(layers.values()))
    for file, tree in models.items():
        for name, shape in recorded_shapes(tree):
            number, _, rest = name.partition(".")
            if not number.isdigit():
                continue  # tied modules lie with the first layer that uses them
            layer = layers.get(int(number))
            expected = prefix + re.sub(r"layer_\d+", f"layer_{int(number):02d}", like)
            if layer is None:
                builder.problem(
                    expected,
                    "missing-file",
                    "",
                    f"the optimizer of {prefix}{file} holds {name}, and the file of that layer is not there",
                )
                break
            found = as_object(trees.get(layer)).get(rest)
            if isinstance(found, Tensor) and found.shape != shape:
                builder.problem(
                    prefix + layer,
                    "shape-mismatch",
                    rest,
                    f"{name} has the shape {list(found.shape)}, the optimizer's record of it says {list(shape)}",
                )


def _add_virtual_weights(builder: Builder, models: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """In stage 3 the weights are the ranks' flat partitions: what is known of each one is its name and shape."""
    if not shards:
        return
    for tree in models.values():
        for name, shape in recorded_shapes(tree):
            builder.model.setdefault(name, Tensor(name, "float32", shape, location="meta"))


# --- optimizers ---------------------------------------------------------------------------------------


def _add_plain_optimizer(builder: Builder, value: Mapping[str, Any], file: str) -> None:
    """Stage 0: the framework's own wrapper around a whole optimizer, or the optimizer itself."""
    inner = value.get("optimizer_state_dict", value)
    if is_optimizer(inner):
        builder.add_optimizer(inner, file, sharded=inner is not value)
        flat = value.get("fp32_groups_flat")
        if isinstance(flat, list) and builder.optimizers[-1].states:
            _hold_masters(builder, [t for t in flat if isinstance(t, Tensor)], file)
    if "cur_scale" in value:
        _add_scaler(builder, value, file, None)


def _add_shard(builder: Builder, shard: Shard, several: bool) -> None:
    if is_optimizer(shard.optimizer):
        builder.add_optimizer(
            shard.optimizer,
            shard.file,
            rank=shard.rank,
            sharded=True,
            name=f"mp{shard.mp}" if several else "",
        )
        _hold_masters(builder, shard.masters, shard.file)
    elif shard.optimizer is not None:
        builder.components["optimizer"] = True  # elastic form: lists of moments
    _add_scaler(builder, items(shard.scaler), shard.file, shard.rank)
    rates, step = _rates(shard), _highest_step(shard)
    of = f"[mp{shard.mp}]" if several else ""
    stated = {
        f"lr{of}": rates,
        "optimizer step": step,
        "zero_stage": shard.stage,
        "partition_count": shard.world,
        "ds_version": shard.version,
    }
    scale = scalar(items(shard.scaler).get("cur_scale"))
    builder.replicated.append(
        (shard.file, {k: v for k, v in {**stated, "loss scale": scale}.items() if v is not None})
    )


def _hold_masters(builder: Builder, flats: Sequence[Tensor], file: str) -> None:
    """The fp32 masters stand with the moments of their group, so that every check of values sees them too."""
    optimizer = builder.optimizers.pop()
    states = list(optimizer.states)
    for place, flat in enumerate(flats):
        builder.mark(flat, file)
        if place < len(states):
            states[place] = replace(states[place], values={**states[place].values, "fp32_master": flat})
    builder.optimizers.append(replace(optimizer, states=tuple(states)))


def _highest_step(shard: Shard) -> int | None:
    states = items(as_object(shard.optimizer).get("state"))
    found = [s for v in states.values() if (s := integer(items(v).get("step"))) is not None]
    groups = as_object(shard.optimizer).get("param_groups")
    found += [
        s
        for g in (groups if isinstance(groups, list) else ())
        if (s := integer(as_object(g).get("step"))) is not None
    ]
    return max(found, default=None)


def _rates(shard: Shard) -> tuple[float, ...] | None:
    groups = as_object(shard.optimizer).get("param_groups")
    if not isinstance(groups, list):
        return None
    return tuple(r for g in groups if (r := scalar(as_object(g).get("lr"))) is not None)


def _add_scaler(builder: Builder, values: Mapping[Any, Any], file: str, rank: int | None) -> None:
    """A static scale of 1 is what bf16 and fp32 runs carry in place of none."""
    scale = scalar(values.get("cur_scale"))
    dynamic = bool(values.get("dynamic", values.get("dynamic_loss_scale")))
    if scale is None or (scale == 1.0 and not dynamic):
        return
    builder.add_scaler({str(k): v for k, v in values.items() if k != "optimizer_state_dict"}, file, rank)
    current, last = integer(values.get("cur_iter")), integer(values.get("last_overflow_iter"))
    if current is not None and last is not None and last > current:
        builder.problem(
            file,
            "scaler-mismatch",
            "loss_scaler",
            f"its last overflow is said to be at iteration {last}, it is at iteration {current}",
        )


def _tree(files: Mapping[str, FileFacts], name: str) -> Any:
    facts = files.get(name)
    return facts.tree if facts is not None else None

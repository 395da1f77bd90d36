"""What the files of a DeepSpeed tag hold, in common terms: ZeRO 0 to 3, pipeline, experts, universal.

Sources: deepspeed 0.19 runtime/engine.py, runtime/zero/{stage_1_and_2,stage3}.py, runtime/bf16_optimizer.py,
runtime/fp16/{fused_optimizer,loss_scaler}.py, utils/zero_to_fp32.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptguard.formats.text import as_object
from ckptguard.layouts._deepspeed_files import EXPERT, LAYER, MODEL, OPTIMIZER, SHARDED_MODEL, UNIVERSAL
from ckptguard.layouts._deepspeed_zero import Shard, add_masters, add_partitions, read_shard
from ckptguard.layouts._ranks import RANK_FILES, SAMPLES, RankFiles, Samples, numbers
from ckptguard.layouts._state import Builder, integer, is_optimizer, items, scalar
from ckptguard.model import FileFacts, ManifestFile, Tensor

# Everything else in a model file is the client's state, merged in flat.
OWN_KEYS = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "num_experts",
        "ds_autoep_layers",
        "universal_checkpoint_info",
        "autoep_layers",
        "folding_metadata",
        "checkpoint_version",
    ]
)
REPLICATED = (
    "global_steps",
    "global_samples",
    "skipped_steps",
    "dp_world_size",
    "mp_world_size",
    "ds_version",
)


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
    for shard in shards:
        _add_shard(builder, shard, several=len({s.mp for s in shards}) > 1)
    if any(name.startswith(f"{UNIVERSAL}/") for name in trees):
        _add_universal(builder, prefix, trees)
        _compare_universal(builder, prefix, models, trees)
    elif stage == 3:
        _add_virtual_weights(builder, models, shards)
    add_partitions(builder, models, shards)
    if stage < 3:
        add_masters(builder, models, shards, prefix)
    _add_progress(builder, prefix, models, head, config, shards)
    _add_topology(builder, members, prefix, models, head, shards, stage)


def client_state(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What the training script put beside DeepSpeed's own keys."""
    return {str(k): v for k, v in tree.items() if k not in OWN_KEYS}


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
    for name, shape in _shapes(tree):
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
        for name, shape in _shapes(tree):
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
        for name, shape in _shapes(tree):
            builder.model.setdefault(name, Tensor(name, "float32", shape, location="meta"))


def _shapes(tree: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    groups = tree.get("param_shapes")
    for group in groups if isinstance(groups, list) else [groups]:
        for name, shape in as_object(group).items():
            if isinstance(shape, tuple) and all(isinstance(d, int) for d in shape):
                yield str(name), shape


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


# --- progress and topology ----------------------------------------------------------------------------


def _add_progress(
    builder: Builder,
    prefix: str,
    models: Mapping[str, Any],
    head: Mapping[str, Any],
    config: Mapping[str, Any],
    shards: Sequence[Shard],
) -> None:
    for name, tree in sorted(models.items()):
        file = prefix + name
        builder.add_counter("global_steps", tree.get("global_steps"), file)
        builder.replicated.append(
            (file, {k: tree[k] for k in REPLICATED if isinstance(tree.get(k), int | str)})
        )
    first = prefix + next(iter(sorted(models)), "")
    step, skipped = integer(head.get("global_steps")), integer(head.get("skipped_steps"))
    builder.step = step if builder.step is None else builder.step
    if skipped is not None:
        builder.skipped_steps = skipped
        if step is not None and skipped > step:
            builder.problem(
                first,
                "step-mismatch",
                "skipped_steps",
                f"{skipped} steps are said to be skipped out of {step}",
            )
    _add_scheduler(builder, first, models, head, config)
    batch, how = _batch(head, config)
    consumed = integer(head.get("global_samples"))
    if batch and consumed is not None:
        builder.attributes[SAMPLES] = Samples(first, "global_samples", consumed, batch, how)
    if as_object(config.get("fp16")).get("enabled") is True and shards:
        builder.attributes["fp16"] = True
    if client := client_state(head):
        seen = len(builder.counters)
        builder.add_tree(client, first)
        # A script counts what it likes: micro-batches, episodes, updates.
        builder.counters[seen:] = [
            replace(c, unit="unknown") if c.unit == "step" else c for c in builder.counters[seen:]
        ]


def _add_scheduler(
    builder: Builder, file: str, models: Mapping[str, Any], head: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    if not models:
        builder.components["scheduler"] = (
            None  # it would be in the file that is not there, or could not be read
        )
        return
    scheduler = head.get("lr_scheduler")
    if isinstance(scheduler, dict):
        builder.add_scheduler(scheduler, file)
    elif scheduler is not None:
        builder.components["scheduler"] = True
    elif not config.get("scheduler") and not any(
        "initial_lr" in g.options for o in builder.optimizers for g in o.groups
    ):
        builder.components["scheduler"] = (
            None  # none was handed to DeepSpeed, and none ever touched the optimizer
        )


def _batch(head: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, str]:
    """Samples a step, by the run's own configuration."""
    known = numbers(config)
    micro, accumulate, world = (
        known.get("train_micro_batch_size_per_gpu"),
        known.get("gradient_accumulation_steps", 1),
        integer(head.get("dp_world_size")),
    )
    if micro and world:
        return (
            micro * accumulate * world,
            f"{micro} a device and micro-batch, {accumulate} micro-batches, {world} ranks",
        )
    whole = known.get("train_batch_size", 0)
    return whole, f"train_batch_size {whole}"


def _add_topology(
    builder: Builder,
    members: Sequence[ManifestFile],
    prefix: str,
    models: Mapping[str, Any],
    head: Mapping[str, Any],
    shards: Sequence[Shard],
    stage: int,
) -> None:
    dimensions = as_object(head.get("checkpoint_parallel_dimensions"))
    world, mp_world = integer(head.get("dp_world_size")), integer(head.get("mp_world_size")) or 1
    builder.topology |= {
        k: v
        for k, v in {
            "dp": world,
            "mp": mp_world,
            "world_size": world * mp_world if world else None,
            "tp": integer(dimensions.get("tp_degree")),
            "pp": integer(dimensions.get("pp_degree")),
            "zero_stage": stage,
        }.items()
        if v is not None
    }
    names = [f.name.removeprefix(prefix) for f in members if f.name.startswith(prefix)]
    optimizers = [m for n in names if (m := OPTIMIZER.match(n))]
    sharded = [m for n in names if (m := SHARDED_MODEL.match(n))]
    first = prefix + next(iter(sorted(models)), "")
    kinds = []
    if world and (optimizers or sharded):
        for mp in sorted({int(m["mp"]) for m in (*optimizers, *sharded)}):
            if optimizers:
                pattern = f"{optimizers[0]['precision'] or ''}zero_pp_rank_{{}}_mp_rank_{mp:02d}{optimizers[0]['bar']}optim_states.pt"
                kinds.append(
                    (
                        "optimizer partition",
                        pattern,
                        world,
                        {int(m["dp"]) for m in optimizers if int(m["mp"]) == mp},
                    )
                )
            if sharded:
                pattern = f"zero_pp_rank_{{}}_mp_rank_{mp:02d}_model_states.pt"
                kinds.append(
                    ("model states", pattern, world, {int(m["dp"]) for m in sharded if int(m["mp"]) == mp})
                )
    if not sharded and models:
        kinds.append(
            (
                "model states",
                "mp_rank_{:02d}_model_states.pt",
                mp_world,
                {int(m["mp"]) for n in names if (m := MODEL.match(n))},
            )
        )
    known = tuple(builder.attributes.get(RANK_FILES, ()))
    recorded = f"{first}: dp_world_size {world}, mp_world_size {mp_world}"
    if not any(n.startswith(f"{UNIVERSAL}/") for n in names):
        builder.attributes[RANK_FILES] = known + tuple(
            RankFiles(w, prefix + p, n, frozenset(r), recorded) for w, p, n, r in kinds
        )
    for shard in shards:
        if world and shard.world is not None and shard.world != world and not shard.hierarchical:
            builder.problem(
                shard.file,
                "topology-mismatch",
                "partition_count",
                f"it is cut into {shard.world} partitions, {first} says {world} data-parallel ranks",
            )
            break


# --- universal ----------------------------------------------------------------------------------------


def _add_universal(builder: Builder, prefix: str, trees: Mapping[str, Any]) -> None:
    """zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt: one parameter, or one of its states, a file."""
    states: dict[str, dict[str, Any]] = {}
    for name, tree in sorted(trees.items()):
        parts = name.split("/")
        if len(parts) != 3 or parts[0] != UNIVERSAL:
            continue
        value = tree.get("param") if isinstance(tree, dict) else tree
        kind = parts[2].removesuffix(".pt")
        if isinstance(value, Tensor):
            builder.mark(value, prefix + name)
        if kind == "fp32" and isinstance(value, Tensor):
            builder.model[parts[1]] = value
        elif value is not None:
            states.setdefault(parts[1], {})[kind] = value
    common = as_object(trees.get(f"{UNIVERSAL}/optimizer_state.pt"))
    groups = common.get("param_groups")
    if states:
        file = f"{prefix}{UNIVERSAL}/optimizer_state.pt"
        rows = [{**as_object(g), "params": []} for g in groups] if isinstance(groups, list) else []
        if rows:
            rows[0]["params"] = sorted(states)
        builder.add_optimizer({"state": states, "param_groups": rows}, file)
        for name, values in states.items():
            for kind, value in values.items():
                if isinstance(value, Tensor):
                    builder.mark(value, f"{prefix}{UNIVERSAL}/{name}/{kind}.pt")


def _compare_universal(
    builder: Builder, prefix: str, models: Mapping[str, Any], trees: Mapping[str, Any]
) -> None:
    """Every trainable parameter that the model files record must have been converted."""
    folders = {
        name.split("/")[1] for name in trees if name.startswith(f"{UNIVERSAL}/") and name.endswith("/fp32.pt")
    }
    shared = {name for tree in models.values() for name in as_object(tree.get("shared_params"))}
    for name in sorted({n for tree in models.values() for n, _ in _shapes(tree)} - folders - shared):
        if "expert" not in name:
            where = f"{prefix}{UNIVERSAL}/{name}/fp32.pt"
            builder.problem(
                where,
                "missing-tensor",
                "",
                f"{name} is a trainable parameter by the model file, and was not converted",
            )


def _tree(files: Mapping[str, FileFacts], name: str) -> Any:
    facts = files.get(name)
    return facts.tree if facts is not None else None

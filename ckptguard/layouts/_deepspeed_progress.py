"""How far a DeepSpeed run is, and over how many ranks: counters, scheduler, samples, world sizes, the client's own state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptguard.formats.text import as_object
from ckptguard.layouts._deepspeed_files import MODEL, OPTIMIZER, SHARDED_MODEL, UNIVERSAL
from ckptguard.layouts._deepspeed_zero import Shard
from ckptguard.layouts._ranks import RANK_FILES, SAMPLES, RankFiles, Samples, numbers
from ckptguard.layouts._state import Builder, integer
from ckptguard.model import ManifestFile

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


def client_state(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What the training script put beside DeepSpeed's own keys."""
    return {str(k): v for k, v in tree.items() if k not in OWN_KEYS}


def add_progress(
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


def add_topology(
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

"""What megatron-core's items mean: sharded tensors by key, sharded objects by key and place, the common state.

Keys (megatron-core dist_checkpointing/mapping.py, optimizer/*.py): model tensors by their own names;
`optimizer.state.<what>.<model name>` for moments and fp32 masters; `optimizer.distributed.dp_group_idx_<i>.*` for the
distributed optimizer's buckets and its parameter groups; objects as `<key>/shard_<place>_<shape>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ckptguard.formats.pickles import Opaque
from ckptguard.formats.text import as_object
from ckptguard.layouts._dcp import Content, add_faults, add_state, name_subjects, read_dcp
from ckptguard.layouts._megatron import COMMON, CONFIG
from ckptguard.layouts._ranks import SAMPLES, Samples
from ckptguard.layouts._state import Builder, integer, items
from ckptguard.model import FileFacts, OptimizerState, ParamGroup, ParamState, Tensor

OBJECT = re.compile(r"^(?P<key>.+)/shard_(?P<place>\d+(?:\.\d+)*)_(?P<shape>\d+(?:\.\d+)*)$")
STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(?P<what>[A-Za-z0-9_]+)\.(?P<name>.+)$")
DISTRIBUTED = re.compile(
    r"^(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.(?P<rest>.+)$"
)
MASTERS = frozenset({"fp32_param", "param", "master_param"})
REPLICATED_ARGS = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "global_batch_size", "micro_batch_size", "padded_vocab_size",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "consumed_train_samples", "iteration",
)  # fmt: skip


def add_megatron(builder: Builder, files: Mapping[str, FileFacts], prefix: str = "") -> Content:
    """Recognise everything in a directory of megatron-core below `prefix` ("" or "weights/")."""
    content = read_dcp(files, prefix)
    add_faults(builder, content)
    if content.index is None:
        _common(builder, _tree(files, prefix + COMMON), prefix + COMMON)
        return content
    if not is_mcore(content):
        _plain(builder, content)
        return content
    _completion(builder, files, prefix)
    objects = dict(sharded_objects(content))
    common, where = _tree(files, prefix + COMMON), prefix + COMMON
    kept = objects.get("common_state")
    if kept:
        common, where = (
            next(iter(kept.values())),
            content.files.get("common_state/shard_0_1", prefix + ".metadata"),
        )
    elif prefix + COMMON not in files:
        builder.problem(
            prefix + COMMON,
            "missing-file",
            "",
            f"{prefix}{COMMON} is not there, and no item holds the common state: iteration, arguments and schedule are lost",
        )
    common = _common(builder, common, where)
    _tensors(builder, content, objects, common, where)
    _rng(builder, content, objects)
    _count_objects(builder, content)
    name_subjects(builder, content)
    return content


def is_mcore(content: Content) -> bool:
    """Whether megatron-core's own strategy wrote the items; its `torch_dcp` and `fsdp_dtensor` are plain DCP saves."""
    index = content.index
    if index is None:
        return False
    if index.extras or any(OBJECT.match(name) for name in index.objects):
        return True
    return not any(entry.path for entry in index.tensors.values()) and not any(index.objects.values())


def sharded_objects(content: Content) -> Iterator[tuple[str, dict[tuple[int, ...], Any]]]:
    """Each sharded object: its parts by their place. megatron-core wraps every part in a list of one."""
    found: dict[str, dict[tuple[int, ...], Any]] = {}
    for name, value in content.objects.items():
        match = OBJECT.match(name)
        if match:
            place = tuple(int(n) for n in match.group("place").split("."))
            found.setdefault(match.group("key"), {})[place] = (
                value[0] if isinstance(value, list) and len(value) == 1 else value
            )
    yield from found.items()


def _tree(files: Mapping[str, FileFacts], name: str) -> Any:
    facts = files.get(name)
    return facts.tree if facts is not None else None


def _completion(builder: Builder, files: Mapping[str, FileFacts], prefix: str) -> None:
    config = files.get(prefix + CONFIG)
    if config is None and any(a.subject == prefix + CONFIG for a in builder.manifest.absences):
        return  # the names alone said so
    if config is None:
        builder.problem(
            prefix + CONFIG,
            "incomplete-save",
            "",
            f"{prefix}{CONFIG} is not there; megatron-core writes it last and does not load a checkpoint without it",
        )
    elif config.tree is not None and not isinstance(as_object(config.tree).get("sharded_backend"), str):
        builder.problem(
            prefix + CONFIG,
            "bad-header",
            "",
            f"{prefix}{CONFIG} names no sharded_backend, so megatron-core does not take this for a checkpoint",
        )


# --- the common state ---------------------------------------------------------------------------------


def _common(builder: Builder, common: Any, where: str) -> Mapping[str, Any]:
    """Iteration, arguments, schedule, scaler. Returns the common state, empty where there is none."""
    state: Mapping[str, Any] = common if isinstance(common, dict) else {}
    add_progress(builder, state, where)
    schedule = state.get("opt_param_scheduler", state.get("lr_scheduler"))
    if isinstance(schedule, dict) and schedule:
        add_schedule(builder, schedule, where)
    for optimizer in optimizers_in(state.get("optimizer")):
        scaler = optimizer.get("grad_scaler")
        if isinstance(scaler, dict):
            builder.add_scaler(scaler, where)
    if "pytorch-lightning_version" in state or "loops" in state:
        _lightning(builder, state, where)
    return state


def add_progress(builder: Builder, common: Mapping[str, Any], where: str) -> None:
    """Iteration and consumed samples, and from the arguments the topology and what the run was told to save."""
    builder.add_counter("iteration", common.get("iteration"), where)
    step = integer(common.get("iteration"))
    if step is not None:
        builder.step = step
    args = common.get("args")
    if not isinstance(args, Opaque):
        return
    values = items(args)
    consumed, batch = integer(values.get("consumed_train_samples")), integer(values.get("global_batch_size"))
    builder.add_counter("args.consumed_train_samples", consumed, where, "samples")
    if (
        consumed is not None
        and batch
        and not values.get("rampup_batch_size")
        and not values.get("perform_rl_step")
    ):
        builder.attributes[SAMPLES] = Samples(
            where, "consumed_train_samples", consumed, batch, "global_batch_size in the arguments"
        )
    for name, short in (
        ("world_size", "world_size"),
        ("tensor_model_parallel_size", "tp"),
        ("pipeline_model_parallel_size", "pp"),
        ("expert_model_parallel_size", "ep"),
        ("context_parallel_size", "cp"),
        ("data_parallel_size", "dp"),
    ):
        number = integer(values.get(name))
        if number is not None:
            builder.topology[short] = number
    for name in (
        "global_batch_size",
        "seq_length",
        "iterations_to_skip",
        "rampup_batch_size",
        "skipped_train_samples",
    ):
        if name in values:
            builder.attributes[name] = values[name]
    if values.get("fp16") is True:
        builder.attributes["fp16"] = True
    if values.get("no_save_optim") and values.get("no_save_rng"):
        builder.attributes["model_only"] = True
    if values.get("no_save_rng"):
        builder.components["rng"] = None
    if values.get("no_save_optim"):
        builder.components["optimizer"] = builder.components["scheduler"] = None


def add_schedule(builder: Builder, schedule: Mapping[str, Any], where: str) -> None:
    """Megatron's scheduler counts samples; the groups' own multipliers come on top of its rate."""
    builder.lr_multiplies = True
    builder.add_scheduler(schedule, where)
    builder.add_counter("opt_param_scheduler.num_steps", schedule.get("num_steps"), where, "samples")


def _lightning(builder: Builder, common: Mapping[str, Any], where: str) -> None:
    """NeMo keeps Lightning's own checkpoint dictionary as the common state."""
    builder.add_counter("global_step", common.get("global_step"), where)
    builder.step = integer(common.get("global_step"))
    builder.add_counter("epoch", common.get("epoch"), where, "epoch")
    builder.add_counter("consumed_samples", _consumed(common), where, "samples")
    for scheduler in common.get("lr_schedulers") or ():
        if isinstance(scheduler, dict):
            add_schedule(builder, scheduler, where)


def _consumed(tree: Any, depth: int = 0) -> int | None:
    """Lightning keeps the data module's counter under the name of its class."""
    if not isinstance(tree, dict) or depth > 2:
        return None
    for key, value in tree.items():
        if key == "consumed_samples":
            return integer(value)
        inner = _consumed(value, depth + 1)
        if inner is not None:
            return inner
    return None


def optimizers_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """The optimizers of a saved optimizer state: one, a list, or a dictionary by index where several are chained."""
    if isinstance(value, list | tuple):
        for inner in value:
            yield from optimizers_in(inner)
    elif isinstance(value, dict):
        if value and all(isinstance(k, int) or str(k).isdecimal() for k in value):
            for inner in value.values():
                yield from optimizers_in(inner)
        elif "param_groups" in value:
            yield value
        elif isinstance(value.get("optimizer"), dict):
            inner = value["optimizer"]
            yield {**{k: v for k, v in value.items() if k != "optimizer"}, **inner}


# --- tensors ------------------------------------------------------------------------------------------


def _tensors(
    builder: Builder,
    content: Content,
    objects: Mapping[str, Mapping[tuple[int, ...], Any]],
    common: Mapping[str, Any],
    where: str,
) -> None:
    states: dict[str, dict[str, Any]] = {}
    buckets: dict[str, dict[str, Any]] = {}
    for name, tensor in content.tensors.items():
        state, distributed = STATE.match(name), DISTRIBUTED.match(name)
        if state:
            states.setdefault(state.group("name"), {})[state.group("what")] = tensor
        elif distributed:
            bucket, _, what = distributed.group("rest").rpartition(".")
            buckets.setdefault(f"dp_group_idx_{distributed.group('group')}.{bucket}", {})[what] = tensor
        elif not name.startswith(("optimizer.", "chained_")):
            builder.add_model({name: tensor}, content.files[name])
    for name, values in states.items():
        for what in MASTERS & values.keys():
            weight = builder.model.get(name)
            if weight is not None and isinstance(values[what], Tensor):
                builder.masters.append((name, values[what], weight))
    groups = _groups(objects, common)
    held = [ParamState(name, values) for name, values in states.items()]
    if held or groups or (not buckets and any(k.startswith("optimizer.") for k in objects)):
        builder.optimizers.append(OptimizerState(where, groups, tuple(held), named=True))
    if buckets:
        builder.optimizers.append(
            OptimizerState(
                where, (), tuple(ParamState(n, v) for n, v in buckets.items()), sharded=True, name="buckets"
            )
        )


def _groups(
    objects: Mapping[str, Mapping[tuple[int, ...], Any]], common: Mapping[str, Any]
) -> tuple[ParamGroup, ...]:
    """Parameter groups with the step that they share; the distributed optimizer keeps them among the objects."""
    found = []
    sources: list[Any] = [common.get("optimizer")]
    for key, parts in objects.items():
        distributed = DISTRIBUTED.match(key)
        if (distributed and distributed.group("rest") == "optimizer") or key == "optimizer":
            sources += parts.values()
    for optimizer in (o for source in sources for o in optimizers_in(source)):
        step = items(optimizer.get("state")).get("common_step")
        for group in optimizer.get("param_groups") or ():
            if isinstance(group, dict):
                options = {k: v for k, v in group.items() if k != "params"}
                if step is not None:
                    options.setdefault("step", step)
                found.append(ParamGroup(options, ()))
    return tuple(found)


def _rng(builder: Builder, content: Content, objects: Mapping[str, Mapping[tuple[int, ...], Any]]) -> None:
    for key, parts in objects.items():
        if key.rpartition(".")[2] != "rng_state":
            continue
        file = next(
            (content.files[n] for n in content.objects if n.startswith(f"{key}/shard_")), content.prefix
        )
        number = 0
        for _, value in sorted(parts.items()):
            for streams in value if isinstance(value, list) else [value]:
                if isinstance(streams, dict):
                    builder.add_rng({str(k): v for k, v in streams.items()}, file, number)
                    number += 1


def _count_objects(builder: Builder, content: Content) -> None:
    """The shape in an object's key says how many parts it has; megatron-core refuses to save fewer."""
    counted: dict[tuple[str, str], int] = {}
    for name in content.index.objects if content.index else ():
        match = OBJECT.match(name)
        if match:
            kind = match.group("key"), match.group("shape")
            counted[kind] = counted.get(kind, 0) + 1
    metadata = content.prefix + ".metadata"
    for (key, shape), count in counted.items():
        wanted = prod(int(n) for n in shape.split("."))
        if key.rpartition(".")[2] == "rng_state":
            builder.attributes["rng_parts"] = (shape, count)
        if count != wanted:
            soft = key.rpartition(".")[2] == "rng_state"
            lowered = {"severity": "warning", "effect": "lossy"} if soft else {}
            builder.problem(
                metadata,
                "missing-rank",
                key,
                f"{key} has {count} of {wanted} parts; its shape is {shape}",
                **lowered,
            )


def _plain(builder: Builder, content: Content) -> None:
    """Megatron's plain DCP formats (Megatron-FSDP): its own state by name, iteration and arguments as items."""
    tree = content.tree()
    where = content.files.get("iteration", content.prefix + ".metadata")
    add_progress(builder, {key: tree.pop(key, None) for key in ("iteration", "args")}, where)
    schedule, generators = tree.pop("opt_param_scheduler", None), tree.pop("rng_state", None)
    if isinstance(schedule, dict) and schedule:
        add_schedule(builder, schedule, where)
    for place in generators.values() if isinstance(generators, dict) else [generators]:
        for streams in place if isinstance(place, list) else [place]:
            if isinstance(streams, dict):
                builder.add_rng({str(k): v for k, v in streams.items()}, where, len(builder.rngs))
    add_state(builder, content, tree)

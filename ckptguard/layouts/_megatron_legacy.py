"""Megatron-LM's legacy format: one torch file for each model-parallel rank, `model_optim_rng.pt`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ckptguard.layouts._megatron import RANK_DIR
from ckptguard.layouts._megatron_state import REPLICATED_ARGS, add_progress, add_schedule, optimizers_in
from ckptguard.layouts._ranks import RANK_PARTS, REPLICAS, RankPart, moments_of, replicas
from ckptguard.layouts._state import Builder, integer, is_weights, items, scalar
from ckptguard.model import FileFacts, Manifest, Role, Tensor

# What every rank's file has, if any has it.
LACKED = (("optimizer", "missing-rank", "optimizer state"), ("rng_state", "missing-rng", "generator states"))


def add_legacy(builder: Builder, manifest: Manifest, files: Mapping[str, FileFacts]) -> None:
    """Recognise the files of all model-parallel ranks. Names get the rank's folder in front where there are several."""
    folders = {f.name.partition("/")[0] for f in manifest.files if f.role is Role.BUNDLE and "/" in f.name}
    builder.attributes["rank_grid"] = _grid(folders)
    buffers = {f.name.partition("/")[0]: (f, _tree(files, f.name)) for f in manifest.by_role(Role.OPTIMIZER)}
    first = True
    for file in manifest.by_role(Role.BUNDLE):
        tree = _tree(files, file.name)
        if not tree:
            continue
        folder = file.name.partition("/")[0]
        prefix = f"{folder}." if len(folders) > 1 else ""
        for key in sorted(k for k in tree if str(k).startswith("model")):
            part = f"{key}." if key != "model" else ""
            for name, tensor in weights_in(tree[key]):
                builder.add_model({part + name: tensor}, file.name, prefix)
        for optimizer in optimizers_in(tree.get("optimizer")):
            if isinstance(optimizer.get("grad_scaler"), dict):
                builder.add_scaler(optimizer["grad_scaler"], file.name, file.rank)
            if items(optimizer.get("state")) or folder not in buffers:
                builder.add_optimizer(optimizer, file.name, rank=file.rank)
                continue
            # The distributed optimizer: groups lie beside the model, the flat buffers of all of them in a file of their own.
            beside, held = buffers.pop(folder)
            whole = {**optimizer, "state": _buckets(held)}
            builder.add_optimizer(whole, beside.name, rank=file.rank, sharded=True, name="buckets")
        _rng(builder, tree, file.name)
        builder.replicated.append((file.name, {**_replicated(tree), **_rates(tree, _peers(folder))}))
        if first:
            add_progress(builder, tree, file.name)
            schedule = tree.get("opt_param_scheduler", tree.get("lr_scheduler"))
            if isinstance(schedule, dict) and schedule:
                add_schedule(builder, schedule, file.name)
            first = False
    _add_parts(builder, manifest, files)


def _peers(folder: str) -> str:
    """Which ranks hold the same layers: those whose folders differ in the tensor-parallel number only."""
    match = RANK_DIR.match(folder)
    return "".join(f"_{n}" for n in match.groups()[1:] if n is not None) if match else ""


def _rates(tree: Mapping[str, Any], peers: str) -> dict[str, Any]:
    """Rates and steps of the optimizers, which tensor-parallel ranks have in common; stages may have groups of their own."""
    found: dict[str, Any] = {}
    for place, optimizer in enumerate(optimizers_in(tree.get("optimizer"))):
        groups = optimizer.get("param_groups")
        rates = [scalar(items(g).get("lr")) for g in (groups if isinstance(groups, list) else ())]
        steps = [integer(items(s).get("step")) for s in items(optimizer.get("state")).values()]
        known = [s for s in steps if s is not None]
        for name, value in (("lr", tuple(rates)), ("step", max(known, default=None))):
            if value:
                found[f"{name} of optimizer {place}{peers and f' of stage {peers[1:]}'}"] = value
    return found


def _add_parts(builder: Builder, manifest: Manifest, files: Mapping[str, FileFacts]) -> None:
    """Record what is each tensor-parallel rank's own and what all of them hold alike, and parts that single ranks lack."""
    held: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for tensor in builder.model.values():
        home, _, name = builder.subjects[id(tensor)].partition(":")
        held[home][name] = tensor
    bundles = [f for f in manifest.by_role(Role.BUNDLE) if _tree(files, f.name)]
    parts, alike = [], []
    for file in bundles:
        peers = _peers(file.name.partition("/")[0])
        own = [t for t in held[file.name].values() if len(t.shape) > 1]
        optimizers = [o for o in builder.optimizers if o.subject == file.name]
        first = tuple(t for o in optimizers for t in moments_of(o))
        what = f"the weights{peers and f' of stage {peers[1:]}'}"
        parts.append(RankPart(what, file.rank or 0, file.name, tuple(own), first))
        alike += [(f"{peers}{peers and ':'}{name}", file.name, t) for name, t in held[file.name].items()]
    builder.attributes[RANK_PARTS] = tuple(parts)
    builder.attributes[REPLICAS] = replicas(alike)
    for key, code, words in LACKED:
        having = [f.name for f in bundles if items(_tree(files, f.name)).get(key)]
        for file in bundles if having else ():
            if file.name not in having:
                builder.problem(file.name, code, "", f"it holds no {words}, {having[0]} does")


def _grid(folders: Iterable[str]) -> tuple[int, ...]:
    """How many ranks there are along each number of the folders' names; which numbers there are depends on the run."""
    ranks = [[int(n) for n in m.groups() if n is not None] for m in map(RANK_DIR.match, folders) if m]
    depth = max(map(len, ranks), default=0)
    return tuple(max((r[axis] for r in ranks if len(r) > axis), default=0) + 1 for axis in range(depth))


def weights_in(value: Any, prefix: str = "") -> list[tuple[str, Tensor]]:
    """Tensors of a model's state dictionary, flat or nested by module as older versions keep it."""
    if not isinstance(value, dict):
        return []
    if is_weights(value):
        return [(f"{prefix}{name}", t) for name, t in value.items() if isinstance(t, Tensor)]
    found = []
    for key, inner in value.items():
        if isinstance(inner, Tensor):
            found.append((f"{prefix}{key}", inner))
        else:
            found += weights_in(inner, f"{prefix}{key}.")
    return found


def _buckets(tree: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """The distributed optimizer's buffers: gathered tensors by buffer, dtype and kind."""
    states: dict[str, dict[str, Any]] = {}

    def gather(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            name, _, what = path.rpartition(".")
            states.setdefault(name, {})[what] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                gather(inner, f"{path}.{key}" if path else str(key))

    gather(tree, "")
    return states


def _tree(files: Mapping[str, FileFacts], name: str) -> Mapping[Any, Any]:
    """What a file holds, where that is a dictionary; else nothing."""
    facts = files.get(name)
    return facts.tree if facts is not None and isinstance(facts.tree, dict) else {}


def _rng(builder: Builder, tree: Mapping[str, Any], file: str) -> None:
    for streams in tree.get("rng_state") or ():
        if isinstance(streams, dict):
            builder.add_rng({str(k): v for k, v in streams.items()}, file, len(builder.rngs))


def _replicated(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What every rank must state alike."""
    found: dict[str, Any] = {}
    for key in ("iteration", "checkpoint_version"):
        if scalar(tree.get(key)) is not None:
            found[key] = scalar(tree.get(key))
    args = items(tree.get("args"))
    for name in REPLICATED_ARGS:
        if integer(args.get(name)) is not None:
            found[f"args.{name}"] = integer(args.get(name))
    schedule = items(tree.get("opt_param_scheduler"))
    if integer(schedule.get("num_steps")) is not None:
        found["opt_param_scheduler.num_steps"] = integer(schedule.get("num_steps"))
    return found

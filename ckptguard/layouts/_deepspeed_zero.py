"""ZeRO's optimizer files: what one rank holds of the flattened groups, and how the parts of all ranks fit together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptguard.formats.pickles import Opaque
from ckptguard.formats.text import as_object
from ckptguard.layouts._deepspeed_files import MODEL, OPTIMIZER, SHARDED_MODEL
from ckptguard.layouts._ranks import PADDING, PARTITIONS, RANK_PARTS, Part, Partition, RankPart
from ckptguard.layouts._state import Builder, integer, items
from ckptguard.model import Tensor
from ckptguard.values import itemsize

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "square_avg", "exp_inf")


@dataclass(frozen=True, slots=True)
class Shard:
    """One optimizer file. `masters` are the flat fp32 partitions, one a group; `world` how many parts there are by its word."""

    file: str
    rank: int
    mp: int
    stage: int
    optimizer: Any
    masters: tuple[Tensor, ...]
    scaler: Any
    world: int | None
    hierarchical: bool
    paddings: tuple[int, ...]
    alignments: tuple[tuple[int, ...], ...]
    slices: tuple[Mapping[str, tuple[int, int]], ...]
    version: str | None


def read_shard(file: str, name: str, tree: Any) -> Shard | None:
    """What an optimizer file holds, whatever of it is there; None where it is none."""
    match = OPTIMIZER.match(name)
    inner = tree.get("optimizer_state_dict") if isinstance(tree, dict) else None
    if match is None or not isinstance(inner, dict):
        return None
    third = "fp32_flat_groups" in inner
    stage = inner.get("zero_stage")
    stage = stage.args[0] if isinstance(stage, Opaque) and stage.args else stage
    counts = inner.get("partition_count")
    parts = [c for c in (counts if isinstance(counts, list | tuple) else [counts]) if isinstance(c, int)]
    masters = inner.get("fp32_flat_groups" if third else "single_partition_of_fp32_groups")
    version = tree.get("ds_version", inner.get("ds_version"))
    return Shard(
        file=file,
        rank=int(match["dp"]),
        mp=int(match["mp"]),
        stage=integer(stage) or (3 if third else 1),
        optimizer=inner.get("optimizer_state_dict" if third else "base_optimizer_state"),
        masters=tuple(_tensors(masters)),
        scaler=inner.get("loss_scaler"),
        world=max(parts, default=None),
        hierarchical=len(set(parts)) > 1,
        paddings=tuple(p for p in _list(inner.get("group_paddings")) if isinstance(p, int)),
        alignments=tuple(
            tuple(n for n in _list(g) if isinstance(n, int))
            for g in _list(inner.get("param_alignment_paddings"))
        ),
        slices=tuple(_slices(g) for g in _list(inner.get("param_slice_mappings"))),
        version=version if isinstance(version, str) else None,
    )


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _tensors(value: Any) -> list[Tensor]:
    """Flat groups: a list of tensors, or in stage 3 with offloading a list of lists of them."""
    found: list[Tensor] = []
    for part in _list(value):
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, list | tuple):
            found += _tensors(part)
    return found


def _slices(group: Any) -> dict[str, tuple[int, int]]:
    """Where each parameter's piece lies in this rank's partition: name -> (start, numel)."""
    found = {}
    for name, address in as_object(group).items():
        start, numel = items(address).get("start"), items(address).get("numel")
        if isinstance(start, int) and isinstance(numel, int):
            found[str(name)] = (start, numel)
    return found


def recorded_shapes(tree: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every parameter that the optimizer holds, by the model file's own record."""
    groups = tree.get("param_shapes")
    for group in groups if isinstance(groups, list) else [groups]:
        for name, shape in as_object(group).items():
            if isinstance(shape, tuple) and all(isinstance(d, int) for d in shape):
                yield str(name), shape


# --- how the parts fit --------------------------------------------------------------------------------


def add_partitions(builder: Builder, models: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """Record the sizes of every rank's parts, for the check that they add up."""
    found: list[Partition] = list(builder.attributes.get(PARTITIONS, ()))
    for mp in sorted({s.mp for s in shards}):
        members = sorted((s for s in shards if s.mp == mp), key=lambda s: s.rank)
        shapes = _group_shapes(models, mp)
        complete = {s.rank for s in members} == set(range(members[0].world or len(members)))
        of = f" of model-parallel rank {mp}" if len({s.mp for s in shards}) > 1 else ""
        if members[0].stage == 3:
            found.append(_third(members, shapes, complete, of))
        else:
            found += _lower(members, shapes, complete, of)
    if found:
        builder.attributes[PARTITIONS] = tuple(found)


def add_rank_parts(builder: Builder, shards: Sequence[Shard]) -> None:
    """Record which numbers are each rank's own, for the check that no rank holds another's."""
    several = len({s.mp for s in shards}) > 1
    parts = list(builder.attributes.get(RANK_PARTS, ()))
    for shard in (s for s in shards if s.world is None or s.rank < s.world):
        states = [items(v) for v in items(as_object(shard.optimizer).get("state")).values()]
        first, second = (
            tuple(v for s in states if isinstance(v := s.get(k), Tensor)) for k in ("exp_avg", "exp_avg_sq")
        )
        what = f"the optimizer partition{f' of model-parallel rank {shard.mp}' if several else ''}"
        parts.append(RankPart(what, shard.rank, shard.file, shard.masters, first, second))
    builder.attributes[RANK_PARTS] = tuple(parts)


def add_padding(builder: Builder, models: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """Record where the parts of stage 3 end before their room does: each parameter is cut in equal shares, the last ones short."""
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    shapes = {mp: _group_shapes(models, mp) for mp in {s.mp for s in shards}}
    for shard in shards:
        numels = [n for group in shapes[shard.mp] for n in group.values()]
        stretches = _short(numels, shard.rank, shard.world or 0, [t.numel for t in shard.masters])
        states = [items(v) for v in items(as_object(shard.optimizer).get("state")).values()]
        for place, inside in stretches.items():
            flat = shard.masters[place]
            moments = states[place].values() if len(states) == len(shard.masters) else ()
            for tensor in (flat, *moments):
                if isinstance(tensor, Tensor) and tensor.numel == flat.numel:
                    found[id(tensor)] = tuple(inside)
    if found:
        builder.attributes[PADDING] = found


def _short(
    numels: Sequence[int], rank: int, world: int, flats: Sequence[int]
) -> dict[int, list[tuple[int, int]]]:
    """(start, numel) of the room that a rank's shares leave empty, by flat group; {} where the shares do not fill the groups."""
    if not world or sum(-(-n // world) for n in numels) != sum(flats):
        return {}
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    place, at = 0, 0
    for numel in numels:
        share = -(-numel // world)
        while place < len(flats) and at == flats[place]:
            place, at = place + 1, 0
        if place == len(flats) or at + share > flats[place]:
            return {}
        held = min(max(numel - rank * share, 0), share)
        if held < share:
            found[place].append((at + held, share - held))
        at += share
    return found


def _group_shapes(models: Mapping[str, Any], mp: int) -> list[dict[str, int]]:
    """Elements of every parameter, by group, as the model file of this model-parallel rank records them."""
    for name, tree in sorted(models.items()):
        match = MODEL.match(name) or SHARDED_MODEL.match(name)
        if match and int(match["mp"]) == mp:
            groups = tree.get("param_shapes")
            return [
                {str(n): prod(s) for n, s in as_object(g).items() if isinstance(s, tuple)}
                for g in (groups if isinstance(groups, list) else [groups])
            ]
    return []


def _moments(shard: Shard, place: int) -> tuple[int, ...]:
    states = list(items(as_object(shard.optimizer).get("state")).values())
    if place >= len(states):
        return ()
    values = items(states[place])
    return tuple(v.numel for k in MOMENTS if isinstance(v := values.get(k), Tensor))


def _lower(
    members: Sequence[Shard], shapes: Sequence[Mapping[str, int]], complete: bool, of: str
) -> list[Partition]:
    """Stages 1 and 2: each group is flattened, padded, and cut in equal parts; the padding is not saved with the masters."""
    world = members[0].world or len(members)
    moe = any(s.hierarchical for s in members)
    result = []
    for group in range(max(len(s.masters) for s in members)):
        wanted = None
        if group < len(shapes) and len(shapes) == len(members[0].masters) and not moe:
            aligned = members[0].alignments[group] if group < len(members[0].alignments) else ()
            wanted = sum(shapes[group].values()) + sum(aligned)
        parts = tuple(
            Part(
                f"{s.file}:optimizer_state_dict.single_partition_of_fp32_groups.{group}",
                s.rank,
                s.masters[group].numel,
                _moments(s, group),
                s.paddings[group] if group < len(s.paddings) else 0,
            )
            for s in members
            if group < len(s.masters)
        )
        result.append(
            Partition(f"parameter group {group}{of}", wanted, parts, align=2 * world, complete=complete)
        )
    return result


def _third(
    members: Sequence[Shard], shapes: Sequence[Mapping[str, int]], complete: bool, of: str
) -> Partition:
    """Stage 3: every parameter is cut on its own, each rank holding its share rounded up."""
    world = members[0].world or len(members)
    numels = [n for group in shapes for n in group.values()]
    wanted = sum(-(-n // world) for n in numels) * len(members) if numels else None
    parts = tuple(
        Part(
            f"{s.file}:optimizer_state_dict.fp32_flat_groups",
            s.rank,
            sum(t.numel for t in s.masters),
            _sums_of_moments(s),
        )
        for s in members
    )
    return Partition(f"the parameters{of}", wanted, parts, equal=True, complete=complete)


def _sums_of_moments(shard: Shard) -> tuple[int, ...]:
    states = [items(v) for v in items(as_object(shard.optimizer).get("state")).values()]
    if len(states) != len(shard.masters):
        return ()  # parameters without a gradient have no state
    return tuple(
        sum(v.numel for s in states if isinstance(v := s.get(k), Tensor))
        for k in MOMENTS
        if all(isinstance(s.get(k), Tensor) for s in states)
    )


# --- fp32 masters and the weights that were made of them ----------------------------------------------


def add_masters(builder: Builder, models: Mapping[str, Any], shards: Sequence[Shard], prefix: str) -> None:
    """Pair every piece of a master partition with the piece of the weight that it was rounded to."""
    for mp in sorted({s.mp for s in shards}):
        name = f"mp_rank_{mp:02d}_model_states.pt"
        module = as_object(as_object(models.get(name)).get("module"))
        members = sorted((s for s in shards if s.mp == mp), key=lambda s: s.rank)
        whole = {s.rank for s in members} == set(range(members[0].world or len(members)))
        taken: dict[str, int] = {}
        for shard in members if whole else ():
            for flat, slices in zip(shard.masters, shard.slices):
                for parameter, (start, numel) in slices.items():
                    weight, file = _weight(builder, module, parameter, prefix + name)
                    offset = taken.get(parameter, 0)
                    taken[parameter] = offset + numel
                    if (
                        weight is not None
                        and weight.contiguous
                        and numel > 0
                        and offset + numel <= weight.numel
                    ):
                        _pair(builder, parameter, flat, start, weight, offset, numel, shard.file, file)


def _weight(builder: Builder, module: Mapping[str, Any], name: str, file: str) -> tuple[Tensor | None, str]:
    """A parameter and the file that it lies in: the model file, or in a pipeline that of its layer."""
    found = module.get(name)
    if isinstance(found, Tensor):
        return found, file
    layer = builder.model.get(name)
    if layer is None or module or any("@mp" in n for n in builder.model):
        return None, ""
    return layer, builder.subjects.get(id(layer), "").partition(":")[0]


def _pair(
    builder: Builder,
    name: str,
    flat: Tensor,
    start: int,
    weight: Tensor,
    offset: int,
    numel: int,
    flat_file: str,
    weight_file: str,
) -> None:
    if start + numel > flat.numel or flat.start is None or weight.start is None or not flat.contiguous:
        return
    master, piece = _piece(flat, start, numel), _piece(weight, offset, numel)
    builder.mark(master, flat_file, flat.name)
    builder.mark(piece, weight_file, weight.name)
    builder.masters.append((name, master, piece))


def _piece(tensor: Tensor, start: int, numel: int) -> Tensor:
    width = itemsize(tensor.dtype)
    assert tensor.start is not None
    piece = Tensor(
        tensor.name,
        tensor.dtype,
        (numel,),
        tensor.start + start * width,
        numel * width,
        (1,),
        tensor.storage,
        tensor.location,
    )
    if tensor.value is not None:
        piece.value = tensor.value.reshape(-1)[start : start + numel]
    return piece

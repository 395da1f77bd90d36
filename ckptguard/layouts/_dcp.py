"""What every layout on top of torch.distributed.checkpoint shares: its files, its marks, and the state in its items.

`dcp_files` and `dcp_absences` work on names. `read_dcp` puts the chunks of all shards together again; `add_dcp` turns
them into model, optimizer and counters by the paths that the planner recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptguard.formats.dcp_metadata import RANK_METADATA
from ckptguard.formats.text import as_object
from ckptguard.layouts._base import is_temporary, rest_of, series_of, step_in
from ckptguard.layouts._dcp_content import METADATA, Content, index_of, read_dcp
from ckptguard.layouts._state import (
    LOADER_NAME,
    OPTIMIZER_NAME,
    RNG_NAME,
    STEP_NAMES,
    Builder,
    integer,
    is_rng,
    is_weights,
    unflatten,
)
from ckptguard.model import Absence, Directory, FileFacts, Manifest, ManifestFile, Role, State, Tensor

SHARD = re.compile(r"(?:^|_)?__(\d+)_(\d+)\.distcp$")
TEMPORARY = re.compile(r"\.metadata\.tmp$")
RANK_IN_KEY = re.compile(r"(?:^|[._-])(?:dp_)?(?:rank)?[_-]?(\d+)$")
TORCH_FILE = re.compile(r"\.(pt|pth|bin|pkl|ckpt)$")


__all__ = [
    "METADATA", "OTHERS", "Content", "add_dcp", "add_faults", "add_loose", "add_state", "dcp_absences", "dcp_files", "dcp_manifest", "has_dcp",
    "index_of", "interpret", "is_committed", "is_megatron", "loose_files", "name_subjects", "read_dcp", "unflatten_optimizer",
]  # fmt: skip


# --- names --------------------------------------------------------------------------------------------


def has_dcp(directory: Directory) -> bool:
    """Whether a directory itself holds what DCP wrote: shards, or the metadata of a save."""
    return any(
        name.endswith(".distcp") or name == METADATA or RANK_METADATA.match(name) for name in directory.files
    )


def dcp_files(directory: Directory, base: str) -> list[ManifestFile]:
    """The files that DCP itself wrote into a directory. Names are relative to `base`, the checkpoint's path."""
    files = []
    for name, entry in sorted(directory.files.items()):
        relative = entry.key[len(base) + 1 if base else 0 :]
        shard = SHARD.search(name)
        rank = RANK_METADATA.match(name)
        if shard or name.endswith(".distcp"):
            files.append(
                ManifestFile(relative, entry, Role.SHARD, "dcp-shard", int(shard.group(1)) if shard else None)
            )
        elif name == METADATA or rank:
            files.append(
                ManifestFile(
                    relative, entry, Role.METADATA, "dcp-metadata", int(rank.group(1)) if rank else None
                )
            )
    return files


def loose_files(directory: Directory, base: str, taken: Iterable[ManifestFile]) -> Iterator[ManifestFile]:
    """torch and JSON files that a training put beside the shards, such as a train state or the RNG of each rank."""
    names = {f.entry.key for f in taken}
    for name, entry in sorted(directory.files.items()):
        relative = entry.key[len(base) + 1 if base else 0 :]
        if entry.key in names or entry.kind == "other":
            continue
        if TORCH_FILE.search(name):
            rank = re.search(r"rank[._-]?(\d+)", name)
            yield ManifestFile(relative, entry, Role.BUNDLE, "torch", int(rank.group(1)) if rank else None)
        elif name.endswith(".json"):
            yield ManifestFile(relative, entry, Role.TRAINER_STATE, "json")


def dcp_absences(directory: Directory, base: str) -> list[Absence]:
    """What names alone show to be missing: the metadata, which is written last, or that of single ranks."""
    prefix = directory.path[len(base) + 1 if base else 0 :] if directory.path != base else ""
    prefix = f"{prefix}/" if prefix else ""
    names = directory.files.keys()
    if METADATA in names:
        return []
    shards = {int(m.group(1)) for m in map(SHARD.search, names) if m}
    ranks = {int(m.group(1)) for m in map(RANK_METADATA.match, names) if m}
    if not ranks:
        half = next((n for n in names if TEMPORARY.search(n)), "")
        why = (
            f"{half} is there: the save was cut off while it was being committed"
            if half
            else "DCP writes it last, so the save did not finish"
        )
        return [Absence("incomplete-save", prefix + METADATA, f"{prefix}{METADATA} is not there; {why}")]
    world = max(ranks | shards) + 1
    return [
        Absence(
            "missing-rank",
            f"{prefix}__{rank}{METADATA}",
            f"rank {rank} of {world} has no metadata: its part of the save did not finish",
        )
        for rank in sorted(set(range(world)) - ranks)
    ]


def is_committed(directory: Directory) -> bool:
    """Whether the metadata of a DCP save was written."""
    return METADATA in directory.files or any(RANK_METADATA.match(n) for n in directory.files)


# Directories of DCP files that belong to a framework with marks of its own.


def is_titan(directory: Directory) -> bool:
    """torchtitan's folders; which framework really wrote one of this name shows in its keys."""
    return bool(re.fullmatch(r"step-\d+", directory.name))


def is_megatron(directory: Directory) -> bool:
    """Megatron-core's torch_dist, also where its completion mark or its metadata is gone."""
    names = directory.files.keys()
    return (
        "metadata.json" in names or "common.pt" in names or bool(re.fullmatch(r"iter_\d{7}", directory.name))
    )


def is_lightning(directory: Directory) -> bool:
    """Lightning's sharded checkpoints: what is not sharded lies in meta.pt."""
    return "meta.pt" in directory.files or directory.name.endswith(".ckpt")


def is_composer(directory: Directory) -> bool:
    return bool(re.match(r"ep\d+-ba\d+", directory.name))


OTHERS = (is_titan, is_megatron, is_lightning, is_composer)


# --- claims -------------------------------------------------------------------------------------------


def dcp_manifest(directory: Directory, layout: str) -> Manifest:
    """The claim on a directory that is one DCP save, with what a training put beside the shards."""
    base = directory.path
    files = dcp_files(directory, base)
    files += loose_files(directory, base, files)
    files += rest_of(directory, files, base)
    temporary = is_temporary(directory.name)
    return Manifest(
        path=base,
        layout=layout,
        files=tuple(files),
        step=step_in(directory.name),
        carries=frozenset({"model", "optimizer", "rng"}),
        absences=tuple(dcp_absences(directory, base)),
        finished=is_committed(directory) and not temporary,
        temporary=temporary,
        series=series_of(directory.name),
        attributes={"indexed": True},
    )


def interpret(manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
    """What a directory that is one DCP save means."""
    builder = Builder(manifest)
    add_dcp(builder, files)
    add_loose(builder, manifest, files)
    return builder.build()


def add_loose(builder: Builder, manifest: Manifest, files: Mapping[str, FileFacts]) -> None:
    """The files that a training put beside the shards."""
    for file in manifest.files:
        facts = files.get(file.name)
        if facts is None or facts.tree is None:
            continue
        if file.role is Role.BUNDLE:
            builder.add_tree(facts.tree, file.name, rank=file.rank)
        elif file.role is Role.TRAINER_STATE:
            for key, value in as_object(facts.tree).items():
                if key in STEP_NAMES:
                    builder.add_counter(key, value, file.name)


# --- state --------------------------------------------------------------------------------------------


def add_dcp(builder: Builder, files: Mapping[str, FileFacts], prefix: str = "") -> Content:
    """Recognise everything that a DCP directory below `prefix` holds: model, optimizer, scheduler, RNG, counters."""
    content = read_dcp(files, prefix)
    add_faults(builder, content)
    if content.index is not None:
        add_state(builder, content, content.tree())
    return content


def add_faults(builder: Builder, content: Content) -> None:
    """What index and shards show to be missing, and which save this is."""
    index = content.index
    if index is None:
        return
    if not builder.save_id:
        builder.save_id = index.save_id
    metadata = content.prefix + METADATA
    for shard in content.missing:
        items = index.items[shard]
        rank = SHARD.search(shard)
        builder.problem(
            content.prefix + shard,
            "missing-file",
            "",
            f"the file is not there, and {metadata} places {len(items)} items of {sum(i.length for i in items)} bytes in it",
        )
        if rank and not any(
            m.group(1) == rank.group(1)
            for s in index.items
            if s not in content.missing and (m := SHARD.search(s))
        ):
            builder.problem(
                content.prefix + shard,
                "missing-rank",
                "",
                f"nothing that rank {rank.group(1)} wrote is there",
            )
    for name in index.unplaced[:20]:
        builder.problem(
            metadata, "missing-tensor", name, f"{name} is described, and no shard is named that holds it"
        )
    for name in index.unknown[:20]:
        builder.problem(
            metadata,
            "unindexed-tensor",
            name,
            f"a shard is said to hold {name}, which the metadata does not describe",
        )
    sealed = [i for items in index.items.values() for i in items if i.transforms]
    if sealed:
        names = ", ".join(sorted({t for i in sealed for t in i.transforms}))
        builder.problem(
            metadata,
            "unverifiable",
            "",
            f"{sum(i.length for i in sealed)} bytes in {len(sealed)} items went through {names} when they were written and were not looked into",
        )
    for file, values in content.replicas:
        alike = {
            n: v
            for n, v in values.items()
            if not RNG_NAME.search(n) and not LOADER_NAME.search(n) and isinstance(v, int | float | str)
        }
        builder.replicated.append((file, alike))


def add_state(builder: Builder, content: Content, tree: Mapping[Any, Any]) -> None:
    """Recognise the parts of a state dictionary that came from DCP, however it was flattened."""
    metadata = content.prefix + METADATA
    before = len(builder.counters)
    tree = {key: with_state(value) for key, value in tree.items()}
    weights = top_weights(tree)
    if weights and any(str(name).startswith(("optimizer.", "optim.", "model.")) for name in weights):
        builder.add_tree(unflatten(weights), metadata)
    elif weights:
        builder.add_model(weights, metadata)
    rest = {key: value for key, value in tree.items() if key not in weights}
    for key, value in rest.items():
        rank = RANK_IN_KEY.search(str(key))
        if isinstance(value, dict) and OPTIMIZER_NAME.search(str(key)) and is_flat_optimizer(value):
            builder.add_optimizer(unflatten_optimizer(value), metadata, name=str(key))
        elif isinstance(value, dict) and rank and RNG_NAME.search(str(key)):
            builder.add_rng({str(k): v for k, v in value.items()}, metadata, int(rank.group(1)))
        elif isinstance(value, Tensor) and is_rng(value):
            builder.add_rng({str(key): value}, metadata)
        else:
            builder.add_tree({key: value}, metadata)
    name_subjects(builder, content, before)


def name_subjects(builder: Builder, content: Content, counters_from: int = 0) -> None:
    """Findings name the shard that holds a tensor or counter, not the metadata."""
    for name, tensor in content.tensors.items():
        builder.subjects[id(tensor)] = f"{content.files[name]}:{tensor.name}"
    for i in range(counters_from, len(builder.counters)):
        counter = builder.counters[i]
        file = content.files.get(counter.name)
        if file is not None:
            builder.counters[i] = replace(counter, subject=file)


def with_state(value: Any, depth: int = 0) -> Any:
    """Optimizers without any state (plain SGD) have their empty one again, of which the planner leaves nothing."""
    if not isinstance(value, dict) or depth > 3:
        return value
    groups = value.get("param_groups")
    if isinstance(groups, list) and "state" not in value:
        return {**value, "state": {}}
    return {key: with_state(inner, depth + 1) for key, inner in value.items()}


def top_weights(tree: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Tensors at the top of a state dictionary that can only be the model's: torchtitan and plain saves put them there."""
    if any(
        isinstance(v, dict) and is_weights(v)
        for k, v in tree.items()
        if not RNG_NAME.search(str(k)) and not OPTIMIZER_NAME.search(str(k))
    ):
        return {}
    return {
        str(k): v
        for k, v in tree.items()
        if isinstance(v, Tensor)
        and not is_rng(v)
        and not (str(k).lower() in STEP_NAMES and integer(v) is not None)
    }


def is_flat_optimizer(value: Mapping[Any, Any]) -> bool:
    """Whether an optimizer's state was flattened to `state.NAME.KEY` and `param_groups.NAME.KEY`."""
    return any(str(key).startswith(("state.", "param_groups.")) for key in value)


def unflatten_optimizer(flat: Mapping[Any, Any]) -> dict[str, Any]:
    """A flattened optimizer state as torch's own: parameters with the same options form a group."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = str(key).partition(".")
        name, _, field_name = rest.rpartition(".")
        (state if kind == "state" else options).setdefault(name, {})[field_name] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, values in options.items():
        group = groups.setdefault(repr(sorted(values.items(), key=lambda p: p[0])), {**values, "params": []})
        group["params"].append(name)
    if not groups and state:
        groups["?"] = {"params": list(state)}
    return {"state": state, "param_groups": list(groups.values())}

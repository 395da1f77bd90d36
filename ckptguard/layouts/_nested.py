"""Layouts inside of others: DeepSpeed or DCP directories in what a trainer, accelerate or Lightning saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckptguard.layouts._dcp import add_dcp
from ckptguard.layouts._deepspeed_state import add_tag
from ckptguard.layouts._ranks import RANK_FILES, RankFiles
from ckptguard.layouts._state import Builder
from ckptguard.model import Absence, Directory, FileFacts, Manifest, ManifestFile, Role
from ckptguard.ports import Resolve

NESTED = "nested"
CHECKPOINT_LAYOUTS = ("deepspeed", "dcp", "torchtitan", "megatron")


def nested_in(directory: Directory, resolve: Resolve) -> list[Manifest]:
    """The layouts that the folders of a checkpoint are by themselves."""
    return [m for _, sub in sorted(directory.dirs.items()) if (m := resolve(sub)) is not None]


def prefix_of(base: str, inner: Manifest) -> str:
    """Where a nested layout lies inside the checkpoint: "optimizer_0/"."""
    return f"{inner.path[len(base) + 1 if base else 0 :]}/"


def nested_files(base: str, nested: Iterable[Manifest]) -> list[ManifestFile]:
    """Their files, by the names that they have in the checkpoint."""
    return [replace(f, name=prefix_of(base, inner) + f.name) for inner in nested for f in inner.files]


def nested_absences(base: str, nested: Iterable[Manifest]) -> list[Absence]:
    return [
        replace(a, subject=prefix_of(base, inner) + a.subject) for inner in nested for a in inner.absences
    ]


def add_nested(builder: Builder, manifest: Manifest, files: Mapping[str, FileFacts]) -> None:
    """What the nested layouts hold, into the checkpoint's own state."""
    nested: Sequence[Manifest] = manifest.attributes.get(NESTED, ())
    for inner in nested:
        prefix = prefix_of(manifest.path, inner)
        if inner.layout == "deepspeed":
            members = [f for f in manifest.files if f.name.startswith(prefix)]
            add_tag(builder, members, files, prefix)
        elif inner.layout in CHECKPOINT_LAYOUTS:
            add_dcp(builder, files, prefix)


def count_rng_files(builder: Builder, manifest: Manifest, present: frozenset[int], pattern: str) -> None:
    """The RNG files against the number of processes that the nested saves show (at least so many there were)."""
    nested: Sequence[Manifest] = manifest.attributes.get(NESTED, ())
    shards = [f.rank for m in nested for f in m.files if f.role is Role.SHARD and f.rank is not None]
    shown = max(builder.topology.get("world_size", 0), max(shards, default=-1) + 1)
    seen = max(present, default=-1) + 1
    if present and shown > seen:
        where = next((m.path.rpartition("/")[2] for m in nested if m.layout in CHECKPOINT_LAYOUTS), "")
        kind = RankFiles("RNG state", pattern, shown, present, f"{where}: {shown} processes")
        builder.attributes[RANK_FILES] = (*builder.attributes.get(RANK_FILES, ()), kind)
    if shown or seen:
        builder.topology["world_size"] = max(shown, seen)

"""What Megatron's layouts share on the level of names: which files a directory of megatron-core has, and what is missing.

megatron-core (dist_checkpointing/core.py, strategies/torch.py) writes shards, then `.metadata`, then `metadata.json`,
which is the mark that the save is complete. Core 0.16 writes `common.pt` first; newer ones keep the common state as an
object among the items.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ckptguard.layouts._base import text_pointer
from ckptguard.layouts._dcp import METADATA, dcp_absences, dcp_files, has_dcp
from ckptguard.model import Absence, Directory, ManifestFile, Pointer, Role

CONFIG = "metadata.json"
COMMON = "common.pt"
INTEGRITY = "integrity.json"
TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = re.compile(r"^iter_(\d{7})$")
RANK_DIR = re.compile(r"^mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?$")
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt")


def is_torch_dist(directory: Directory) -> bool:
    """A directory that megatron-core's dist_checkpointing wrote, also where a part of it is gone."""
    names = directory.files.keys()
    if has_dcp(directory):
        return CONFIG in names or COMMON in names or is_iteration(directory.name)
    return COMMON in names and (CONFIG in names or is_iteration(directory.name)) and not is_zarr(directory)


def is_zarr(directory: Directory) -> bool:
    """megatron-core's older format: a zarr array for each tensor."""
    return (
        CONFIG in directory.files
        and not has_dcp(directory)
        and any(".zarray" in sub.files for sub in directory.dirs.values())
    )


def is_legacy(directory: Directory) -> bool:
    """Megatron-LM's own format before dist_checkpointing: a torch file for each model-parallel rank."""
    return any(
        RANK_DIR.match(name) and any(f in sub.files for f in RANK_FILES)
        for name, sub in directory.dirs.items()
    )


def is_iteration(name: str) -> bool:
    return bool(ITERATION.match(name)) or name == "release"


def iteration_in(name: str) -> int | None:
    match = ITERATION.match(name)
    return int(match.group(1)) if match else None


def torch_dist_files(directory: Directory, base: str) -> list[ManifestFile]:
    """The files that megatron-core itself wrote. Names are relative to `base`, the checkpoint's path."""
    files = dcp_files(directory, base)
    for name, role, format in (
        (COMMON, Role.TRAINER_STATE, "torch"),
        (CONFIG, Role.METADATA, "json"),
        (INTEGRITY, Role.OTHER, "json"),
    ):
        entry = directory.files.get(name)
        if entry is not None:
            files.append(ManifestFile(entry.key[len(base) + 1 if base else 0 :], entry, role, format))
    return files


def torch_dist_absences(directory: Directory, base: str) -> list[Absence]:
    """What names alone show to be missing. Whether a directory without `common.pt` needs one shows in its metadata only."""
    prefix = directory.path[len(base) + 1 if base else 0 :] if directory.path != base else ""
    prefix = f"{prefix}/" if prefix else ""
    absent = dcp_absences(directory, base)
    if CONFIG not in directory.files and (COMMON in directory.files or METADATA not in directory.files):
        absent.append(
            Absence(
                "incomplete-save",
                prefix + CONFIG,
                f"{prefix}{CONFIG} is not there; megatron-core writes it last and does not load a checkpoint without it",
            )
        )
    return absent


def rank_absences(directory: Directory) -> list[Absence]:
    """Holes in the grid of model-parallel ranks of the legacy format: tensor, pipeline and expert parallel."""
    found = {
        m.groups()
        for name, sub in directory.dirs.items()
        if (m := RANK_DIR.match(name)) and any(f in sub.files for f in RANK_FILES)
    }
    # PPP and EEE are written only where there are several; a name with one number after TT may mean either.
    depth = max(sum(part is not None for part in g) for g in found) if found else 0
    ranks = {tuple(int(p) for p in g[:depth] if p is not None) for g in found}
    sizes = [max((r[axis] for r in ranks if len(r) > axis), default=0) + 1 for axis in range(depth)]
    absent = []
    for rank in _grid(sizes):
        if rank not in ranks:
            name = f"mp_rank_{rank[0]:02d}" + "".join(f"_{n:03d}" for n in rank[1:])
            absent.append(
                Absence(
                    "missing-rank",
                    f"{name}/model_optim_rng.pt",
                    f"{name} is not there; ranks of a grid of {' x '.join(map(str, sizes))} are",
                )
            )
    return absent


def _grid(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    cells: list[tuple[int, ...]] = [()]
    for size in sizes:
        cells = [(*cell, n) for cell in cells for n in range(min(size, 1000))]
    return cells if sizes else []


def tracker_pointer(directory: Directory, read: Callable[[str], bytes], layout: str) -> Pointer | None:
    """The tracker names an iteration, or says `release`. Written after the data, not atomically."""
    if any(name.startswith("global_step_") for name in directory.dirs):
        return None  # verl has a tracker of the same name
    pointer = text_pointer(directory, TRACKER, read, layout)
    if pointer is None or pointer.kind == "link":
        return pointer
    says = pointer.names
    name = (
        f"iter_{int(says):07d}"
        if says.isdecimal() and len(says) < 12
        else "release"
        if says == "release"
        else ""
    )
    exists = bool(name) and (name in directory.dirs or name in directory.files)
    resolved = (f"{directory.path}/{name}" if directory.path else name) if exists else None
    return Pointer(pointer.entry, "text", says, resolved, layout)

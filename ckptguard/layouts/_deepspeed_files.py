"""The files of a DeepSpeed tag directory, and what their names alone show (deepspeed runtime/engine.py, 0.19)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ckptguard.layouts._base import is_temporary, rest_of, series_of
from ckptguard.layouts._ranks import absent_ranks
from ckptguard.model import Absence, Directory, Manifest, ManifestFile, Role

MODEL = re.compile(r"^mp_rank_(?P<mp>\d{2,})_model_states\.pt$")
SHARDED_MODEL = re.compile(r"^zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d{2,})_model_states\.pt$")
OPTIMIZER = re.compile(
    r"^(?P<precision>bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d{2,})(?P<bar>_?)optim_states\.pt$"
)
LAYER = re.compile(r"^layer_(?P<layer>\d+)(?:-model_(?P<mp>\d+))?-model_states\.pt$")
EXPERT = re.compile(
    r"^(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt$"
)
EXPERT_OPTIMIZER = re.compile(r"^expp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d{2,})_optim_states\.pt$")
TAG = re.compile(r"global_?step_?(\d+)$")
PARTS = (MODEL, SHARDED_MODEL, OPTIMIZER, LAYER, EXPERT, EXPERT_OPTIMIZER)
UNIVERSAL = "zero"
UNIVERSAL_STATES = ("exp_avg.pt", "exp_avg_sq.pt", "step.pt")
CARRIES = frozenset({"model", "optimizer", "scheduler"})


def is_tag(directory: Directory) -> bool:
    """Whether this very directory holds what one `save_checkpoint` wrote."""
    return any(p.match(name) for name in directory.files for p in PARTS) or is_universal(directory)


def is_universal(directory: Directory) -> bool:
    zero = directory.dirs.get(UNIVERSAL)
    return zero is not None and any("fp32.pt" in sub.files for sub in zero.dirs.values())


def holds_tags(directory: Directory) -> bool:
    """Whether this is a save directory: tags lie in it."""
    return any(is_tag(sub) for sub in directory.dirs.values())


def claim_tag(directory: Directory, layout: str) -> Manifest | None:
    """The checkpoint that a tag directory is, from its names."""
    if not is_tag(directory):
        return None
    universal = is_universal(directory)
    files = list(tag_files(directory))
    step = TAG.search(directory.name.removesuffix("_universal"))
    return Manifest(
        path=directory.path,
        layout=layout,
        files=(*files, *rest_of(directory, files, directory.path)),
        step=int(step.group(1)) if step else None,
        carries=CARRIES,
        gaps=("rng", "dataloader"),
        absences=tuple(_universal_absences(directory) if universal else _absences(files)),
        temporary=is_temporary(directory.name),
        finished=not is_temporary(directory.name),
        series=series_of(directory.name) if step else "",
        attributes={"universal": universal, "conversion": universal},
    )


def tag_files(directory: Directory) -> Iterator[ManifestFile]:
    base = len(directory.path) + 1 if directory.path else 0
    for name, entry in sorted(directory.files.items()):
        for pattern in PARTS:
            match = pattern.match(name)
            if match is None:
                continue
            parts = match.groupdict()
            role = Role.OPTIMIZER if pattern in (OPTIMIZER, EXPERT_OPTIMIZER) else Role.MODEL
            rank = parts.get("dp") or parts.get("rank")
            yield ManifestFile(name, entry, role, "torch", int(rank) if rank is not None else None)
            break
    if is_universal(directory):
        for entry in directory.dirs[UNIVERSAL].walk():
            if entry.name.endswith(".pt"):
                role = Role.MODEL if entry.name == "fp32.pt" else Role.OPTIMIZER
                yield ManifestFile(entry.key[base:], entry, role, "torch")


def _absences(files: Sequence[ManifestFile]) -> Iterator[Absence]:
    """Gaps in the ranks, ranks that wrote one of their two files only, and files that no one save writes together."""
    models = {int(m["mp"]) for f in files if (m := MODEL.match(f.name))}
    sharded: dict[int, set[int]] = defaultdict(set)
    optimizers: dict[int, set[int]] = defaultdict(set)
    spellings: dict[str, str] = {}
    for file in files:
        if match := SHARDED_MODEL.match(file.name):
            sharded[int(match["mp"])].add(int(match["dp"]))
        elif match := OPTIMIZER.match(file.name):
            optimizers[int(match["mp"])].add(int(match["dp"]))
            spellings.setdefault(
                (match["precision"] or "")
                + "zero_pp_rank_{{}}_mp_rank_{mp:02d}"
                + match["bar"]
                + "optim_states.pt",
                file.name,
            )
    world = max((max(ranks) + 1 for ranks in (*sharded.values(), *optimizers.values())), default=0)
    for mp in sorted({*models, *sharded, *optimizers}) if optimizers else ():
        yield from absent_ranks(
            "optimizer partition", next(iter(spellings)).format(mp=mp), optimizers.get(mp, ()), world
        )
    for mp in sorted({*sharded, *optimizers}) if sharded else ():
        yield from absent_ranks(
            "model states", f"zero_pp_rank_{{}}_mp_rank_{mp:02d}_model_states.pt", sharded.get(mp, ()), world
        )
    if not sharded:
        for mp in range(max((*models, *optimizers), default=-1) + 1):
            if mp not in models:
                name = f"mp_rank_{mp:02d}_model_states.pt"
                yield Absence(
                    "missing-rank", name, f"the model states of model-parallel rank {mp} are not there"
                )
    yield from _missing_experts(files)
    if len(spellings) > 1:
        first, second = list(spellings.values())[:2]
        yield Absence(
            "mixed-saves",
            second,
            f"{first} and {second} are of runs with different precision: two saves share this directory",
        )
    if models and sharded:
        name = next(f.name for f in files if SHARDED_MODEL.match(f.name))
        yield Absence(
            "mixed-saves",
            name,
            f"{name} is of ZeRO stage 3, mp_rank_{min(models):02d}_model_states.pt of a lower stage: two saves share this directory",
        )


def _missing_experts(files: Sequence[ManifestFile]) -> Iterator[Absence]:
    layers: dict[tuple[str, str], set[int]] = defaultdict(set)
    for file in files:
        if match := EXPERT.match(file.name):
            layers[match["layer"] or "", match["mp"]].add(int(match["expert"]))
    count = max((max(experts) + 1 for experts in layers.values()), default=0)
    for (layer, mp), experts in sorted(layers.items()):
        prefix = f"layer_{layer}_" if layer else ""
        for expert in sorted(set(range(count)) - experts):
            name = f"{prefix}expert_{expert}_mp_rank_{mp}_model_states.pt"
            yield Absence(
                "missing-rank",
                name,
                f"expert {expert} of layer {layer or 0} is not there; {len(experts)} of at least {count} are",
            )


def _universal_absences(directory: Directory) -> Iterator[Absence]:
    """Parameters without one of the states that others have."""
    folders = {name: sub for name, sub in directory.dirs[UNIVERSAL].dirs.items() if sub.files}
    states = {n for sub in folders.values() for n in sub.files if n in UNIVERSAL_STATES}
    for name, sub in sorted(folders.items()):
        # A buffer has its value only; a parameter has all that the others have.
        wanted = {"fp32.pt"} | (states if states & sub.files.keys() else set())
        for state in sorted(wanted - sub.files.keys()):
            path = f"{UNIVERSAL}/{name}/{state}"
            yield Absence(
                "missing-file", path, f"the parameter {name} has no {state}, other parameters have it"
            )
    if not any(MODEL.match(n) or SHARDED_MODEL.match(n) for n in directory.files):
        yield Absence(
            "missing-file",
            "mp_rank_00_model_states.pt",
            "no model states file lies beside the converted parameters",
        )

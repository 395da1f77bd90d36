"""verl's `global_step_N/`: a folder a role, and in it one file a rank (FSDP) or Megatron's `dist_ckpt` directories.

The tracker `latest_checkpointed_iteration.txt` is written last, in asynchronous mode by each role on its own. Which of
model, optimizer and extra state exist follows `save_contents`, so that a whole kind may be absent by choice.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptguard.formats.text import as_object
from ckptguard.layouts._base import LayoutBase, is_temporary, locate, rest_of, series_of, text_pointer
from ckptguard.layouts._dtensor import Placed, localised, untiled
from ckptguard.layouts._hf import weight_files
from ckptguard.layouts._nested import NESTED, add_nested, nested_absences, nested_files
from ckptguard.layouts._ranks import RANK_PARTS, RankPart, absent_ranks, moments_of
from ckptguard.layouts._state import Builder, integer, is_optimizer, items
from ckptguard.model import (
    Absence,
    Directory,
    FileFacts,
    Manifest,
    ManifestFile,
    Pointer,
    Role,
    State,
    Tensor,
)
from ckptguard.ports import Resolve

NAME = re.compile(r"^global_step_?(\d+)$")
KIND = re.compile(r"^(?P<kind>model|optim|extra_state)_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt$")
KINDS = {"model": Role.MODEL, "optim": Role.OPTIMIZER, "extra_state": Role.RNG}
WORDS = {"model": "weights", "optim": "optimizer state", "extra_state": "extra state (RNG, scheduler)"}
CONTENTS = "ckpt_contents.json"
TRACKER = "latest_checkpointed_iteration.txt"
ROLES = ("actor", "critic", "ref", "rm", "reward", "model")


class Verl(LayoutBase):
    name = "verl"
    order = 390  # role folders hold Megatron and DCP directories, which would otherwise be found alone

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        roles = {n: d for n, d in sorted(directory.dirs.items()) if n in ROLES and _is_role(d)}
        if _is_role(directory) and not (roles and NAME.match(directory.name)):
            roles = {"": directory}
        elif not NAME.match(directory.name) and not any(_has_rank_files(d) for d in roles.values()):
            roles = {}
        if not roles:
            return ()
        base = directory.path
        files = [f for d in roles.values() for f in _role_files(d, base)]
        if "data.pt" in directory.files:
            files.append(ManifestFile("data.pt", directory.files["data.pt"], Role.DATALOADER, "torch"))
        nested = [m for d in roles.values() for m in _nested(d, resolve)]
        files += nested_files(base, nested)
        step = NAME.match(directory.name)
        return (
            Manifest(
                path=base,
                layout=self.name,
                files=(*files, *rest_of(directory, files, base)),
                step=int(step.group(1)) if step else None,
                carries=frozenset({"model", "optimizer", "scheduler", "rng"}),
                absences=(
                    *(a for d in roles.values() for a in _absences(d, base)),
                    *nested_absences(base, nested),
                ),
                temporary=is_temporary(directory.name),
                finished=not is_temporary(directory.name),
                series=series_of(directory.name),
                attributes={NESTED: tuple(nested), "roles": tuple(roles)},
            ),
        )

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        add_nested(builder, manifest, files)
        parts: dict[str, dict[int, Placed]] = defaultdict(dict)
        cut: set[int] = set()
        for file in manifest.files:
            match = KIND.match(file.name.rpartition("/")[2])
            if match:
                found: dict[int, Placed] = {}
                tree = localised(_tree(files, file.name), found)
                _add_rank(builder, file, match["kind"], tree, found, parts)
                cut |= {key for key, part in found.items() if part.copies == 1 and part.ranks > 1}
                builder.topology.setdefault("world_size", int(match["world"]))
            elif file.role is Role.DATALOADER and (loader := items(_tree(files, file.name))):
                builder.add_loader(dict(loader), file.name)
        for name, placed in parts.items():
            why = untiled(placed)
            if why:
                file_name, _, tensor = name.partition(":")
                builder.problem(file_name, "shape-mismatch", tensor, f"{tensor}: {why}")
        _add_parts(builder, manifest, cut)
        # One training step makes as many optimizer steps as it has mini-batches and epochs over them.
        builder.attributes["free_steps"] = True
        builder.step = manifest.step
        return builder.build()

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        if not any(NAME.match(n) for n in directory.dirs):
            return ()
        pointer = text_pointer(directory, TRACKER, read, self.name)
        if pointer is None or not pointer.names.isdigit():
            return ()
        resolved = locate(directory, f"global_step_{int(pointer.names)}")
        return (Pointer(pointer.entry, "text", pointer.names, resolved, self.name),)


# --- names --------------------------------------------------------------------------------------------


def _has_rank_files(directory: Directory) -> bool:
    return any(KIND.match(n) for n in directory.files)


def _is_role(directory: Directory) -> bool:
    """FSDP files of ranks, or Megatron's dist_ckpt, directly (v1) or a folder a kind (v2, with its list of contents)."""
    if _has_rank_files(directory) or CONTENTS in directory.files:
        return True
    dirs = directory.dirs
    return "dist_ckpt" in dirs or any(
        "dist_ckpt" in dirs[n].dirs for n in ("model", "optimizer", "extra") if n in dirs
    )


def _nested(directory: Directory, resolve: Resolve) -> Iterator[Manifest]:
    places = [directory, *(directory.dirs[n] for n in ("model", "optimizer", "extra") if n in directory.dirs)]
    for place in places:
        inner = resolve(place.dirs["dist_ckpt"]) if "dist_ckpt" in place.dirs else None
        if inner is not None:
            yield inner


def _role_files(directory: Directory, base: str) -> Iterator[ManifestFile]:
    skip = len(base) + 1 if base else 0
    for name, entry in sorted(directory.files.items()):
        match = KIND.match(name)
        if match:
            yield ManifestFile(entry.key[skip:], entry, KINDS[match["kind"]], "torch", int(match["rank"]))
        elif name.endswith(".json"):
            yield ManifestFile(entry.key[skip:], entry, Role.OTHER, "json")
    export = directory.dirs.get("huggingface")
    if export is not None:
        # A copy of the model for inference: read and proven, but not what training resumes from.
        for file in weight_files(export, base):
            role = Role.OTHER if file.role in (Role.MODEL, Role.INDEX) else file.role
            yield ManifestFile(file.name, file.entry, role, file.format)


def _absences(directory: Directory, base: str) -> Iterator[Absence]:
    prefix = directory.path[len(base) + 1 if base else 0 :] if directory.path != base else ""
    prefix = f"{prefix}/" if prefix else ""
    found: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in directory.files:
        if match := KIND.match(name):
            found[match["kind"]][int(match["world"])].add(int(match["rank"]))
    worlds = {world for kinds in found.values() for world in kinds}
    for kind, by_world in sorted(found.items()):
        for world, ranks in sorted(by_world.items()):
            yield from absent_ranks(
                WORDS[kind], f"{prefix}{kind}_world_size_{world}_rank_{{}}.pt", ranks, world
            )
    if len(worlds) > 1:
        first, second = sorted(worlds)[:2]
        kind = next(k for k, by_world in sorted(found.items()) if second in by_world)
        name = f"{prefix}{kind}_world_size_{second}_rank_{min(found[kind][second])}.pt"
        yield Absence(
            "mixed-saves",
            name,
            f"files of world sizes {first} and {second} lie here together: two saves share this directory",
        )


# --- content ------------------------------------------------------------------------------------------


def _add_rank(
    builder: Builder,
    file: ManifestFile,
    kind: str,
    tree: Any,
    found: Mapping[int, Placed],
    parts: dict[str, dict[int, Placed]],
) -> None:
    rank, role = file.rank or 0, file.name.rpartition("/")[0]
    prefix = f"{role}:" if role not in ("", "actor") else ""
    if kind == "model":
        for name, tensor in as_object(tree).items():
            if isinstance(tensor, Tensor):
                builder.model[f"{prefix}{name}{f'@rank{rank}' if rank else ''}"] = tensor
                builder.mark(tensor, file.name)
                if id(tensor) in found:
                    first = re.sub(r"_rank_\d+", "_rank_0", file.name)
                    parts[f"{first}:{name}"][rank] = found[id(tensor)]
    elif kind == "optim" and is_optimizer(tree):
        builder.add_optimizer(tree, file.name, rank=rank, sharded=True, name=role)
        steps = [s for p in builder.optimizers[-1].states if (s := integer(p.values.get("step"))) is not None]
        if steps:
            builder.replicated.append((file.name, {f"{role or 'optimizer'} step": max(steps)}))
    elif kind == "extra_state":
        extra = as_object(tree)
        if isinstance(extra.get("lr_scheduler"), dict):
            if rank == 0:
                builder.add_scheduler(extra["lr_scheduler"], file.name, rank)
            builder.replicated.append(
                (file.name, {f"{role or 'scheduler'} last_epoch": extra["lr_scheduler"].get("last_epoch")})
            )
        if isinstance(extra.get("rng"), dict):
            builder.add_rng({str(k): v for k, v in extra["rng"].items()}, file.name, rank)


def _add_parts(builder: Builder, manifest: Manifest, cut: Collection[int]) -> None:
    """Record what is each rank's own: the local parts of tensors that are cut over all ranks."""
    held: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in builder.model.values():
        if id(tensor) in cut and tensor.numel:
            held[builder.subjects[id(tensor)].partition(":")[0]].append(tensor)
    moved = {o.subject: o for o in builder.optimizers}
    parts = list[RankPart]()
    for file in manifest.files:
        match = KIND.match(file.name.rpartition("/")[2])
        if match is None or match["kind"] == "extra_state":
            continue
        folder, rank = file.name.rpartition("/")[0], int(match["rank"])
        optimizer = moved.get(re.sub(r"(^|/)model_world", r"\1optim_world", file.name))
        first, second = (
            tuple(t for t in moments_of(optimizer, key) if id(t) in cut) if optimizer else ()
            for key in ("exp_avg", "exp_avg_sq")
        )
        if match["kind"] == "model":
            what = f"the {folder or 'model'} weights"
            parts.append(RankPart(what, rank, file.name, tuple(held[file.name]), first))
            if optimizer is not None and (strange := _strange(held[file.name], first)):
                builder.problem(
                    optimizer.subject, "shape-mismatch", "", f"{strange}, which {file.name} has not"
                )
        else:
            what = f"the {folder or 'model'} optimizer state"
            parts.append(RankPart(what, rank, file.name, (), first, second))
    builder.attributes[RANK_PARTS] = tuple(parts)


def _strange(weights: Iterable[Tensor], moments: Iterable[Tensor]) -> str:
    """A shape that a rank's moments have and its weights have not, or not so often; "" where there is none."""
    there = Counter(t.shape for t in weights)
    for shape, count in Counter(t.shape for t in moments).items():
        if count > there[shape]:
            return f"{count} moments have the shape {list(shape)}"
    return ""


def _tree(files: Mapping[str, FileFacts], name: str) -> Any:
    facts = files.get(name)
    return facts.tree if facts is not None else None


LAYOUT = Verl()

"""Orbax checkpoints (JAX): a directory a step, with items in folders and arrays in an OCDBT store.

What is checked: names, completion, sizes, the store's manifests and tree nodes by their CRC-32C, the tree of names. What
is not: the arrays themselves, which are compressed and carry no checksum that can be verified without TensorStore.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptguard.formats.text import as_object
from ckptguard.layouts._base import LayoutBase, is_temporary
from ckptguard.layouts._state import Builder
from ckptguard.model import Absence, Directory, FileFacts, Manifest, ManifestFile, Role, State, Tensor
from ckptguard.ports import Resolve

TOP = "_CHECKPOINT_METADATA"
ITEM = "_METADATA"
MANIFEST = "manifest.ocdbt"
COMMIT = "commit_success.txt"
STEP = re.compile(r"^(?:.*?[_-])?0*(\d+)(?:\.orbax-checkpoint-tmp.*)?$")
PROCESS = re.compile(r"^ocdbt\.process_\d+$")
WEIGHTS = frozenset({"params", "model", "weights", "variables", "target"})
OPTIMIZERS = frozenset({"opt_state", "optimizer", "opt", "optimizer_state", "param_states"})
RNGS = frozenset({"rng", "rngs", "key", "prng", "rng_key", "dropout_rng"})


class Orbax(LayoutBase):
    name = "orbax"
    order = 1600

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        if not _is_step(directory) and not _is_item(directory):
            return ()
        base = directory.path
        step = STEP.match(directory.name)
        absences = tuple(_absences(directory))
        return (
            Manifest(
                path=base,
                layout=self.name,
                files=tuple(_files(directory, base)),
                step=int(step.group(1)) if step else None,
                carries=frozenset({"model", "optimizer"}),
                gaps=("scheduler", "dataloader"),
                absences=absences,
                temporary=is_temporary(directory.name),
                finished=not is_temporary(directory.name)
                and not any(a.code == "incomplete-save" for a in absences),
                series="" if directory.name.isdigit() else re.sub(r"\d+", "#", directory.name),
            ),
        )

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        for file in manifest.files:
            tree = _tree(files, file.name)
            if file.name.endswith(ITEM) and isinstance(tree, dict):
                _add_names(builder, as_object(tree.get("tree_metadata")), file.name)
            elif file.role is Role.DATALOADER and isinstance(tree, dict):
                builder.add_loader(tree, file.name)
        top = _tree(files, TOP)
        if isinstance(top, dict) and "commit_timestamp_nsecs" in top and not top["commit_timestamp_nsecs"]:
            builder.problem(
                TOP,
                "incomplete-save",
                "commit_timestamp_nsecs",
                "no time of commit is recorded: the save did not finish",
            )
        builder.components.setdefault("rng", None)
        builder.components.setdefault("scheduler", None)
        return builder.build()


def _is_step(directory: Directory) -> bool:
    return TOP in directory.files or (
        (directory.name.isdigit() or is_temporary(directory.name))
        and any(_is_item(d) for d in directory.dirs.values())
    )


def _is_item(directory: Directory) -> bool:
    names = directory.files.keys()
    return ITEM in names or MANIFEST in names or any(PROCESS.match(d) for d in directory.dirs)


def _files(directory: Directory, base: str) -> Iterator[ManifestFile]:
    for entry in directory.walk():
        name = entry.key[len(base) + 1 if base else 0 :]
        if entry.name in (TOP, ITEM, "_sharding"):
            yield ManifestFile(
                name, entry, Role.METADATA if entry.name != "_sharding" else Role.OTHER, "json"
            )
        elif entry.name == MANIFEST or "/d/" in f"/{name}":
            rank = re.search(r"ocdbt\.process_(\d+)/", name)
            yield ManifestFile(name, entry, Role.SHARD, "ocdbt", int(rank.group(1)) if rank else None)
        elif entry.name == "metadata" and name.count("/") == 1:
            yield ManifestFile(
                name,
                entry,
                Role.DATALOADER if re.search(r"data|loader|iter", name.split("/")[0]) else Role.OTHER,
                "json",
            )
        else:
            yield ManifestFile(name, entry, Role.OTHER, "opaque")


def _absences(directory: Directory) -> Iterator[Absence]:
    """Stores without their manifest, and saves without the mark of their commit."""
    for store, sub in _stores(directory, ""):
        if MANIFEST not in sub.files:
            yield Absence(
                "missing-file",
                f"{store}{MANIFEST}",
                f"{store}{MANIFEST} is not there: nothing says where the arrays lie",
            )
        elif "d" not in sub.dirs and not any(PROCESS.match(d) for d in sub.dirs):
            yield Absence(
                "missing-file", f"{store}d", f"{store}{MANIFEST} is there and no data file beside it"
            )
        processes = {int(d.rpartition("_")[2]) for d in sub.dirs if PROCESS.match(d)}
        for rank in sorted(set(range(max(processes, default=-1) + 1)) - processes):
            yield Absence(
                "missing-rank",
                f"{store}ocdbt.process_{rank}",
                f"process {rank} has written nothing; {len(processes)} others have",
            )
    items = [d for d in directory.dirs.values() if _is_item(d) or COMMIT in d.files]
    if COMMIT not in directory.files and any(COMMIT in d.files for d in items):
        yield Absence(
            "incomplete-save",
            COMMIT,
            f"its items were committed, {COMMIT} of the whole is not there: the save did not finish",
        )
    if TOP not in directory.files and items and not _is_item(directory):
        yield Absence(
            "missing-file", TOP, f"{TOP} is not there: orbax writes it for every checkpoint of a step"
        )


def _stores(directory: Directory, prefix: str) -> Iterator[tuple[str, Directory]]:
    names = directory.dirs.keys()
    if (
        MANIFEST in directory.files
        or any(PROCESS.match(d) for d in names)
        or (ITEM in directory.files and "d" in names)
    ):
        yield prefix, directory
    for name, sub in sorted(directory.dirs.items()):
        if name != "d":
            yield from _stores(sub, f"{prefix}{name}/")


def _add_names(builder: Builder, names: Mapping[str, Any], file: str) -> None:
    """Arrays by name and shape: the tree's first key tells what an array is."""
    for entry in names.values():
        keys = [str(as_object(k).get("key", "")) for k in as_object(entry).get("key_metadata") or ()]
        value = as_object(as_object(entry).get("value_metadata"))
        if not keys:
            continue
        shape = value.get("write_shape")
        tensor = Tensor(
            ".".join(keys), "unknown", tuple(shape) if isinstance(shape, list) else (), location="meta"
        )
        if any(k in OPTIMIZERS for k in keys[:2]):
            builder.components["optimizer"] = True
        elif any(k in WEIGHTS for k in keys[:2]) or (
            len(keys) > 1 and value.get("value_type") in ("jax.Array", "np.ndarray")
        ):
            builder.model[tensor.name] = tensor
            builder.mark(tensor, file)
        elif keys[0] in RNGS:
            builder.components["rng"] = True


def _tree(files: Mapping[str, FileFacts], name: str) -> Any:
    facts = files.get(name)
    return facts.tree if facts is not None else None


LAYOUT = Orbax()

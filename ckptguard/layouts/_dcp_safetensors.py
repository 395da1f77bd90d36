"""DCP's writer of distributed safetensors shards (torch/distributed/checkpoint/hf_storage.py): no metadata file and no index.

Each `shard-R-model-I-of-N.safetensors` says in its own header where in the whole tensors its pieces lie. Consolidated saves
(torchtitan's export too) keep the shards in `sharded/`, below the full files and their index, which is written last; they
are no checkpoint of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ckptguard.formats.dcp_metadata import Chunk, TensorEntry
from ckptguard.layouts._base import is_temporary, rest_of, series_of, step_in
from ckptguard.layouts._dcp_content import join_chunks
from ckptguard.layouts._state import Builder
from ckptguard.model import Absence, Directory, FileFacts, Manifest, ManifestFile, Role, State, Tensor

SHARD = re.compile(r"^shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors$")
PLACES = "DCP_SHARDING_INFO"
PIECES = "sharded"
INDEX = "model.safetensors.index.json"


def has_shards(directory: Directory) -> bool:
    """Whether DCP wrote safetensors shards here that nobody put together beside them."""
    if directory.name == PIECES and any(n.endswith(".safetensors.index.json") for n in directory.beside):
        return False
    return any(SHARD.match(name) for name in directory.files)


def is_half_consolidated(directory: Directory) -> bool:
    """Whether shards were to be put together here, and never were: their index would be the last file."""
    pieces = directory.dirs.get(PIECES)
    return pieces is not None and has_shards(pieces)


def half_manifest(directory: Directory, layout: str) -> Manifest:
    """The claim on a save that ended before its shards were put together. Nothing loads it by itself."""
    base = directory.path
    inside = shards_manifest(directory.dirs[PIECES], layout)
    files = [replace(f, name=f"{PIECES}/{f.name}") for f in inside.files]
    files += rest_of(directory, files, base)
    message = f"{INDEX} is not there; it is written when the shards in {PIECES}/ have been put together, so the save did not finish"
    absences = [replace(a, subject=f"{PIECES}/{a.subject}") for a in inside.absences]
    return replace(
        inside,
        path=base,
        files=tuple(files),
        step=step_in(directory.name),
        absences=(Absence("incomplete-save", INDEX, message), *absences),
        temporary=is_temporary(directory.name),
        finished=False,
        series=series_of(directory.name),
    )


def shards_manifest(directory: Directory, layout: str) -> Manifest:
    """The claim on a directory of such shards: weights alone."""
    files = []
    for name, entry in sorted(directory.files.items()):
        match = SHARD.match(name)
        if match:
            files.append(ManifestFile(name, entry, Role.MODEL, "safetensors", int(match.group(1)) - 1))
    files += rest_of(directory, files, directory.path)
    ranks = {f.rank for f in files if f.rank is not None}
    absences = [
        Absence(
            "missing-rank",
            f"shard-{rank + 1:05d}",
            f"no shard of rank {rank} is there, and one of rank {max(ranks)} is",
        )
        for rank in sorted(set(range(max(ranks))) - ranks)
    ]
    # A rank writes file I of N only where it holds something of it, and some rank always does.
    parts = [m.groups() for n in directory.files if (m := SHARD.match(n))]
    count = max(int(of) for _, _, of in parts)
    absences += [
        Absence(
            "missing-file",
            f"model-{part:05d}-of-{count:05d}",
            f"no rank has a file {part} of {count}",
        )
        for part in sorted(set(range(1, count + 1)) - {int(part) for _, part, _ in parts})
    ]
    return Manifest(
        path=directory.path,
        layout=layout,
        files=tuple(files),
        step=step_in(directory.name),
        carries=frozenset({"model", "optimizer", "rng"}),
        absences=tuple(absences),
        temporary=is_temporary(directory.name),
        finished=not is_temporary(directory.name),
        series=series_of(directory.name),
        attributes={"weights_only": True, "format": "safetensors-shards"},
    )


def interpret_shards(manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
    """Put the pieces of each tensor together. The whole shape is that of the box around all pieces."""
    builder = Builder(manifest)
    pieces: dict[str, dict[Chunk, tuple[str, Tensor]]] = {}
    for file in manifest.by_role(Role.MODEL):
        facts = files.get(file.name)
        if facts is None or facts.tree is None:
            continue
        for tensor, offsets in _placed(builder, file.name, facts):
            pieces.setdefault(tensor.name, {})[Chunk(offsets, tensor.shape)] = (file.name, tensor)
    for name, parts in pieces.items():
        where, first = next(iter(parts.values()))
        depth = {len(c.offsets) for c in parts}
        if (
            len(depth) != 1
            or any(len(c.sizes) != len(c.offsets) for c in parts)
            or len({t.dtype for _, t in parts.values()}) != 1
        ):
            builder.problem(
                where,
                "shape-mismatch",
                name,
                f"the pieces of {name} differ in dtype or in the number of dimensions",
            )
            continue
        shape = tuple(max(c.offsets[axis] + c.sizes[axis] for c in parts) for axis in range(depth.pop()))
        whole, where = join_chunks(
            TensorEntry(name, first.dtype, shape, tuple(parts)), [(c, f, t) for c, (f, t) in parts.items()]
        )
        builder.add_model({name: whole}, where)
        held = sum(c.numel for c in parts)
        if held != prod(shape):
            builder.problem(
                where,
                "missing-tensor",
                name,
                f"the pieces of {name} hold {held} elements, its shape {list(shape)} has {prod(shape)}",
            )
    return builder.build()


def _placed(builder: Builder, file: str, facts: FileFacts) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Each tensor of a shard with its place in the whole."""
    places: Any = None
    try:
        places = json.loads(facts.details.get("metadata", {}).get(PLACES, "null"))
    except ValueError:
        places = None
    if not isinstance(places, dict):
        builder.problem(
            file,
            "bad-header",
            "",
            f"{file} does not say where its tensors belong ({PLACES} is not there, or is no JSON)",
        )
        return
    for tensor in facts.tensors:
        place = places.get(tensor.name)
        offsets = place.get("saved_offsets") if isinstance(place, dict) else None
        if isinstance(offsets, list) and all(type(n) is int and n >= 0 for n in offsets):
            yield tensor, tuple(offsets)
        else:
            builder.problem(
                file, "bad-header", tensor.name, f"{file} does not say where {tensor.name} belongs"
            )

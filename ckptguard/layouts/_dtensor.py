"""DTensors in torch files: each rank's file holds the local part, with the whole's shape and how it was cut.

Pickled form: torch.distributed.tensor (2.5 to 2.13): `_rebuild_wrapper_subclass` with the whole's size, and a state that
has `_local_tensor` and `_spec` (mesh, placements).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptguard.formats.pickles import Opaque
from ckptguard.model import Tensor

NAMES = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed._tensor.api.DTensor",
    "torch.distributed._tensor.DTensor",
)
MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Placed:
    """A local part: of which whole, and how many ranks hold the same part."""

    local: Tensor
    shape: tuple[int, ...]
    copies: int
    ranks: int


def placed(value: Any) -> Placed | None:
    """The local part of a DTensor that was read, None for anything else."""
    if not isinstance(value, Opaque) or value.name not in NAMES:
        return None
    local, spec = value.get("_local_tensor"), value.get("_spec")
    if not isinstance(local, Tensor):
        return None
    shape = next(
        (a for a in value.args if isinstance(a, tuple) and all(isinstance(d, int) for d in a)), local.shape
    )
    mesh = _mesh_shape(spec.get("mesh") if isinstance(spec, Opaque) else None)
    placements = spec.get("placements") if isinstance(spec, Opaque) else None
    kinds = (
        [p.name.rpartition(".")[2] if isinstance(p, Opaque) else "" for p in placements]
        if isinstance(placements, tuple)
        else []
    )
    copies = prod(n for n, kind in zip(mesh, kinds) if kind == "Replicate")
    return Placed(local, shape, copies, prod(mesh) if mesh else 0)


def _mesh_shape(mesh: Any) -> tuple[int, ...]:
    if not isinstance(mesh, Opaque):
        return ()
    ranks = mesh.get("mesh")  # torch up to 2.8 pickles the tensor of ranks itself
    if isinstance(ranks, Tensor):
        return ranks.shape
    layout = mesh.get("_layout")
    shapes: list[int] = []
    axes = layout.get("axes") if isinstance(layout, Opaque) else None
    if isinstance(axes, tuple):
        for axis in axes:
            shapes += _ints(axis.get("shape")) if isinstance(axis, Opaque) else []
    elif isinstance(layout, Opaque):
        shapes = _ints(layout.get("shape"))
    return tuple(shapes)


def _ints(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [d for part in value for d in _ints(part)] if isinstance(value, list | tuple) else []


def localised(tree: Any, found: dict[int, Placed], depth: int = 0) -> Any:
    """The tree with every DTensor replaced by its local part; `found` gets what is known of each, by the part's id."""
    part = placed(tree)
    if part is not None:
        part.local.local_of = "DTensor"
        found[id(part.local)] = part
        return part.local
    if depth > MAX_DEPTH:
        return tree
    if isinstance(tree, dict):
        return {k: localised(v, found, depth + 1) for k, v in tree.items()}
    if isinstance(tree, list):
        return [localised(v, found, depth + 1) for v in tree]
    return tree


def untiled(parts: Mapping[int, Placed]) -> str:
    """Why the ranks' parts do not make up the whole, "" where they do or where it cannot be told."""
    shapes = {p.shape for p in parts.values()}
    if len(shapes) > 1:
        return f"the ranks disagree on its shape: {', '.join(str(list(s)) for s in sorted(shapes))}"
    ranks = {p.ranks for p in parts.values()}
    if ranks != {len(parts)}:
        return ""  # not all of the mesh is here
    any_part = next(iter(parts.values()))
    held, wanted = sum(p.local.numel for p in parts.values()), prod(any_part.shape) * any_part.copies
    return "" if held == wanted else f"its parts hold {held} elements, {wanted} would make it whole"

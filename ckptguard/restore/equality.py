"""Decides, both ways, whether live objects hold exactly what the checkpoint holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptguard.restore.leaves import Leaf, Path, same_number
from ckptguard.restore.model import Difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """`compared` counts the leaves that are equal or differ; `skipped` those that nothing could be said of."""

    differences: tuple[Difference, ...]
    compared: int
    skipped: int


def compare(component: str, saved: Mapping[Path, Leaf], restored: Mapping[Path, Leaf]) -> Comparison:
    """Every leaf of either side that the other lacks, or holds with another dtype, shape or value."""
    differences: list[Difference] = []
    compared = skipped = 0
    held = {restored[path].memory for path in saved if path in restored and restored[path].memory}
    for path, leaf in saved.items():
        other = restored.get(path)
        if leaf.kind == "other" or (other is not None and other.kind == "other"):
            skipped += 1
            continue
        if other is None:
            if leaf.kind != "none":
                compared += 1
                differences.append(_difference("dropped", component, path, leaf, None))
            continue
        compared += 1
        kind = _kind(leaf, other)
        if kind:
            differences.append(_difference(kind, component, path, leaf, other))
    for path, leaf in restored.items():
        if path in saved or leaf.kind in ("none", "other"):
            continue
        if leaf.memory and leaf.memory in held:
            continue  # tied: saved once, under another name
        compared += 1
        kind = "added" if _is_setting(component, path, saved) else "defaulted"
        differences.append(_difference(kind, component, path, None, leaf))
    return Comparison(tuple(differences), compared, skipped)


def _kind(saved: Leaf, restored: Leaf) -> str:
    """What differs between two leaves, or "" when nothing does."""
    if saved.kind == "tensor" and restored.kind == "tensor":
        if saved.shape != restored.shape:
            return "reshaped"
        if saved.dtype != restored.dtype:
            return "cast"
        if saved.digest and restored.digest:
            return "" if saved.digest == restored.digest else "changed"
        return "" if same_number(saved.value, restored.value) else "changed"
    if saved.kind == "none" or restored.kind == "none":
        return "" if saved.kind == restored.kind else "changed"
    # A library may keep a number as a 0-d tensor (learning rates, steps) and back: only its value counts.
    return "" if same_number(saved.value, restored.value) else "changed"


def _is_setting(component: str, path: Path, saved: Mapping[Path, Leaf]) -> bool:
    """Whether this is a hyper-parameter or private field that the version which wrote the file did not have.

    Loading an older file leaves it at the constructor's value in every group alike: that is how libraries grow.
    """
    if component.startswith("optimizer") and len(path) >= 3 and path[-3] == "param_groups":
        return not any(len(p) >= 3 and p[-3] == "param_groups" and p[-1] == path[-1] for p in saved)
    return component.startswith("scheduler") and len(path) == 1 and path[0].startswith("_")


def _difference(
    kind: str, component: str, path: Path, saved: Leaf | None, restored: Leaf | None
) -> Difference:
    name = ".".join(path)
    subject = saved.subject if saved is not None else ""
    size = None
    if saved is not None and restored is not None:
        left, right = saved.value, restored.value
        if isinstance(left, int | float) and isinstance(right, int | float):
            size = abs(float(left) - float(right))
    return Difference(
        kind,
        component,
        name,
        subject or f"{component}:{name}",
        saved.show() if saved is not None else "",
        restored.show() if restored is not None else "",
        size,
    )

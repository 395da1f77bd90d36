"""The sentences of a restore: numbers and differences as a reader wants them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckptguard.restore.model import Difference

_KIND = {
    "dropped": "in the file, but not in the restored object",
    "defaulted": "in the restored object, but not in the file: it was left as built",
    "cast": "restored with another dtype",
    "reshaped": "restored with another shape",
    "changed": "restored with another value",
    "added": "settings of this library version that the file does not have; left as built",
}


def number(value: float | None) -> str:
    """Seven significant digits: enough to see single-precision differences."""
    return "none" if value is None else f"{value:.7g}"


def describe_differences(component: str, kind: str, members: Sequence[Difference]) -> str:
    """One sentence for all differences of one kind in one component, with the first few named."""
    first = members[0]
    if kind == "absent":
        return f"the checkpoint holds nothing for {component}: it was left as built ({first.restored})"
    if kind == "unused":
        return f"the checkpoint holds {component}, which the recipe does not restore: it was not compared"
    shown = "; ".join(_one(member) for member in members[:3])
    more = f"; and {len(members) - 3} more" if len(members) > 3 else ""
    count = "1 value is" if len(members) == 1 else f"{len(members)} values are"
    return f"{component}: {count} {_KIND[kind]}: {shown}{more}"


def _one(difference: Difference) -> str:
    name = difference.path or difference.component
    if difference.kind == "dropped":
        return f"{name} ({difference.saved})"
    if difference.kind in ("defaulted", "added"):
        return f"{name} = {difference.restored}"
    if difference.kind == "changed" and difference.saved == difference.restored:
        return f"{name} ({difference.saved}, other bytes{_size(difference)})"
    return f"{name}: expected {difference.saved}, found {difference.restored}{_size(difference)}"


def _size(difference: Difference) -> str:
    return f", largest difference {number(difference.size)}" if difference.size is not None else ""

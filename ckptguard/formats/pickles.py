"""The pickle reader: a machine of our own that understands every opcode and resolves no name.

Globals become inert `Name` objects. Calls are made only to the exact names in `reconstruct.CALLS`, whose stand-ins are
ours and build plain data; any other call yields an inert `Opaque` and is written down, so that the check for unsafe
pickles judges exactly what the reader saw. Work and memory are bounded by the size of the input.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckptguard.errors import FormatError
from ckptguard.formats._inert import Name, Opaque, Pickled
from ckptguard.formats._machine import Call, Machine, Persistent
from ckptguard.formats._opcodes import DISPATCH
from ckptguard.model import GlobalUse, Tensor

__all__ = ["Name", "Opaque", "Pickled", "names_used", "read_pickle", "walk"]

MAX_DEPTH = 500  # the standard pickler's own recursion ends before
SHARING = 8
MIN_VALUES = 1_000_000

# What damaged bytes can make a handler raise. Anything else is a fault of ours.
_DAMAGE = (LookupError, ValueError, TypeError, ArithmeticError, struct.error, AttributeError, AssertionError)


def read_pickle(
    data: bytes | memoryview,
    *,
    start: int = 0,
    persistent: Persistent | None = None,
    calls: Mapping[str, Call] | None = None,
) -> Pickled:
    """Read the pickle at `start`. Raises FormatError (bad-header, truncated) and nothing else."""
    if calls is None:
        from ckptguard.formats.reconstruct import CALLS

        calls = CALLS
    machine = Machine(bytes(data) if isinstance(data, memoryview) else data, start, persistent, calls)
    try:
        pickled = machine.run(DISPATCH)
    except FormatError:
        raise
    except _DAMAGE as e:
        raise FormatError(
            "bad-header", f"pickle is damaged near byte {machine.pos}: {type(e).__name__}"
        ) from e
    except (RecursionError, MemoryError) as e:
        raise FormatError(
            "bad-header", f"pickle nests or grows beyond all measure near byte {machine.pos}"
        ) from e
    _check_size(pickled.value, MIN_VALUES + SHARING * len(data))
    return pickled


def names_used(data: bytes) -> tuple[GlobalUse, ...]:
    """The names that a pickle uses up to where it breaks: an unpickler would have used them too."""
    from ckptguard.formats.reconstruct import CALLS

    machine = Machine(data, 0, None, CALLS)
    with contextlib.suppress(FormatError, *_DAMAGE, RecursionError, MemoryError):
        machine.run(DISPATCH)
    return tuple(GlobalUse(name, how) for name, how in machine.uses)


def walk(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf of a tree with its path, in order. What is shared is visited where it appears first.

    Raises FormatError when the tree is nested deeper than any checkpoint's.
    """
    children = _children(tree)
    if children is None:
        yield (), tree
        return
    seen = {id(tree)}
    path: list[Any] = []
    stack = [iter(children)]
    while stack:
        for key, value in stack[-1]:
            inner = _children(value)
            if inner is None:
                yield (*path, key), value
            elif id(value) not in seen:
                if len(stack) > MAX_DEPTH:
                    raise FormatError("bad-header", f"the object is nested deeper than {MAX_DEPTH} levels")
                seen.add(id(value))
                path.append(key)
                stack.append(iter(inner))
                break
        else:
            stack.pop()
            if path:
                path.pop()


def _check_size(tree: Any, limit: int) -> None:
    """Raise FormatError where whoever walks the tree, counting what is shared as often as it appears, would never end.

    A few hundred bytes can make lists that hold one another 2**100 times.
    """
    sizes: dict[int, int] = {}
    stack: list[tuple[Any, list[Any] | None]] = [(tree, None)]
    while stack:
        value, inner = stack.pop()
        if inner is not None:
            total = sizes[id(value)] + sum(sizes.get(id(child), 1) for child in inner)
            if total > limit:
                raise FormatError(
                    "bad-header", "the pickle's values hold one another over and over: a decompression bomb"
                )
            sizes[id(value)] = total
        elif isinstance(value, _CONTAINERS) and id(value) not in sizes:
            children = _values(value)
            sizes[id(value)] = 1 + len(children)  # a cycle ends where it meets itself
            inner = [child for child in children if isinstance(child, _CONTAINERS)]
            if inner:
                stack.append((value, inner))
                stack.extend((child, None) for child in inner)


def _values(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else [child for _, child in _children(value) or ()]


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, Opaque):
        inner: list[tuple[Any, Any]] = list(value.items.items())
        inner += enumerate(value.elements)
        inner += [(f"__args__.{i}", a) for i, a in enumerate(value.args) if isinstance(a, _HELD)]
        if isinstance(value.state, dict):
            inner += value.state.items()
        elif isinstance(value.state, tuple | list | Opaque):
            inner.append(("__state__", value.state))
        return inner
    return None


_CONTAINERS = (dict, list, tuple, Opaque)
_HELD = (dict, list, tuple, Opaque, Tensor, bytes, bytearray)

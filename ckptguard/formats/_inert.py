"""What a pickle's names and objects become: inert stand-ins that hold what was said of them and do nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptguard.errors import FormatError
from ckptguard.model import GlobalUse

MAX_NAME = 1000
MAX_KEY = 10_000


@dataclass(frozen=True, slots=True)
class Name:
    """A global that the pickle refers to; never imported."""

    full: str

    def __repr__(self) -> str:
        return f"<name {self.full}>"


@dataclass(slots=True, eq=False)
class Opaque:
    """Stands for an object that was not built: its class, what it would have been made from, its state."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute or item by name, wherever the class keeps it."""
        if isinstance(self.state, dict) and key in self.state:
            return self.state[key]
        if isinstance(self.state, tuple):
            for part in self.state:
                if isinstance(part, dict) and key in part:
                    return part[key]
        return self.items.get(key, default)

    def __repr__(self) -> str:
        return f"<opaque {self.name}>"


@dataclass(frozen=True, slots=True)
class Pickled:
    """What one pickle holds, the names it uses, and the offset behind its STOP."""

    value: Any
    globals: tuple[GlobalUse, ...]
    end: int
    protocol: int


def brief(value: Any, most: int = 80) -> str:
    """A value for an error text. Only plain ones are spelled out: the text of a nested one can be of any length."""
    if isinstance(value, str | bytes):
        return repr(value[:most])
    return (
        str(value)[:most]
        if isinstance(value, int | float | Name) or value is None
        else f"a {type(value).__name__}"
    )


def checked_key(value: Any) -> Any:
    """The value, if its hash costs no more than a real key's. Tuples that hold one another many times cost 2**depth."""
    left, stack = MAX_KEY, [value]
    while stack:
        inner = stack.pop()
        if isinstance(inner, tuple | frozenset):
            left -= 1 + len(inner)
            if left < 0:
                raise FormatError("bad-header", f"a key of more than {MAX_KEY} parts")
            stack.extend(i for i in inner if isinstance(i, tuple | frozenset))
    return value

"""The stack machine that reads one pickle: its memory, and what calls, names and states do to it."""

from __future__ import annotations

import _compat_pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptguard.errors import FormatError
from ckptguard.formats._inert import MAX_NAME, Name, Opaque, Pickled, checked_key
from ckptguard.model import GlobalUse

MARK = object()
Persistent = Callable[[Any], Any]
Handlers = Sequence["Callable[[Machine], None] | None"]


@dataclass(frozen=True, slots=True)
class Through:
    """A stand-in for what calls one of its arguments: `run(machine, *args)` calls it through the machine, where it is judged."""

    run: Callable[..., Any]


Call = Callable[..., Any] | Through


class Machine:
    """The stack machine. One instance reads one pickle."""

    def __init__(
        self, data: bytes, start: int, persistent: Persistent | None, calls: Mapping[str, Call]
    ) -> None:
        self.data = data
        self.pos = start
        self.persistent = persistent
        self.calls = calls
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.uses: dict[tuple[str, str], None] = {}
        self.protocol = 0
        # What reconstructors may copy in all: nested copies of copies would grow exponentially.
        self.budget = 1_000_000 + 8 * len(data)

    # --- running ------------------------------------------------------------------------------------

    def run(self, dispatch: Handlers) -> Pickled:
        """Read up to the STOP. Raises FormatError, and what handlers meet in damaged input (see read_pickle)."""
        data = self.data
        size = len(data)
        while self.pos < size:
            code = data[self.pos]
            self.pos += 1
            if code == 0x2E:  # STOP
                value = self.stack.pop()
                if value is MARK:
                    raise ValueError
                uses = tuple(GlobalUse(name, how) for name, how in self.uses)
                return Pickled(value, uses, self.pos, self.protocol)
            handler = dispatch[code]
            if handler is None:
                raise FormatError(
                    "bad-header", f"byte {self.pos - 1} of the pickle, 0x{code:02x}, is no opcode"
                )
            handler(self)
        raise FormatError("truncated", f"the pickle ends at byte {size} without its STOP")

    def take(self, count: int) -> bytes:
        end = self.pos + count
        if count < 0 or end > len(self.data):
            raise FormatError(
                "truncated",
                f"the pickle wants {count} bytes at {self.pos}, it has {len(self.data) - self.pos}",
            )
        piece = self.data[self.pos : end]
        self.pos = end
        return piece

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            raise FormatError("truncated", f"the pickle ends inside a line that starts at byte {self.pos}")
        piece = self.data[self.pos : end]
        self.pos = end + 1
        return piece

    def since_mark(self) -> list[Any]:
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not MARK:
            at -= 1
            if at < 0:
                raise ValueError
        items = stack[at + 1 :]
        del stack[at:]
        return items

    # --- names and calls ----------------------------------------------------------------------------

    def name(self, module: str, name: str) -> Name:
        if self.protocol < 3:
            # The unpickler maps Python 2 names before it looks them up; judging the unmapped name would miss some.
            mapped = _compat_pickle.NAME_MAPPING.get((module, name))
            if mapped:
                module, name = mapped
            else:
                module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        if len(module) + len(name) > MAX_NAME:
            raise FormatError("bad-header", f"a name of {len(module) + len(name)} characters")
        full = f"{module}.{name}"
        self.note(full, "named")
        return Name(full)

    def note(self, name: str, how: str) -> None:
        self.uses[(name, how)] = None

    def call(self, function: Any, args: Any) -> Any:
        if not isinstance(args, tuple):
            raise ValueError
        if not isinstance(function, Name):
            described = function.name if isinstance(function, Opaque) else type(function).__name__
            self.note(f"{described}()", "called")
            return Opaque(f"{described}()", args)
        build = self.calls.get(function.full)
        if build is None:
            enum = len(args) == 1 and type(args[0]) in (str, int)
            self.note(function.full, "enum" if enum else "called")
            return Opaque(function.full, args)
        self.note(function.full, "allowed")
        self.spend(args)
        try:
            return build.run(self, *args) if isinstance(build, Through) else build(*args)
        except FormatError:
            raise
        except Exception as e:  # a stand-in given nonsense must not break the reader
            raise FormatError(
                "bad-header", f"{function.full} has arguments that it cannot have ({type(e).__name__})"
            ) from e

    def new(self, cls: Any, args: Any, kwargs: Any = None) -> Any:
        if not isinstance(args, tuple):
            raise ValueError
        if not isinstance(cls, Name):
            self.note("an object that is no class", "called")
            return Opaque("?", args)
        build = self.calls.get(cls.full)
        if build is not None and not isinstance(build, Through) and not kwargs:
            self.note(cls.full, "allowed")
            self.spend(args)
            try:
                return build(*args)
            except Exception:  # noqa: BLE001 - NEWOBJ does not run __init__: its arguments may differ from a call's
                return Opaque(cls.full, args)
        self.note(cls.full, "built")
        return Opaque(cls.full, args, items=dict(kwargs) if isinstance(kwargs, dict) else {})

    def spend(self, args: tuple[Any, ...]) -> None:
        for arg in args:
            if isinstance(arg, list | dict | tuple | set | bytes | bytearray | str):
                self.budget -= len(arg)
        if self.budget < 0:
            raise FormatError(
                "bad-header", "the pickle copies its values over and over: a decompression bomb"
            )

    def build(self, state: Any) -> None:
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target.state = state
            self.note(target.name, "built")
            return
        if isinstance(target, Name):
            # BUILD on a name sets attributes of the class, module or function itself.
            self.note(f"setattr on {target.full}", "called")
            return
        setter = getattr(target, "set_pickled_state", None)
        if setter is not None:
            self.spend((state,) if not isinstance(state, tuple) else state)
            self.stack[-1] = setter(state)
            self.replace(target, self.stack[-1])
        # State for plain data (a parameter's hooks, a dictionary's attributes) means nothing to us.

    def replace(self, old: Any, new: Any) -> None:
        """A stand-in that became something else is replaced where it was memoised, so that later uses see it too."""
        if new is old:
            return
        for key in (len(self.memo) - 1, *self.recent_puts):
            if self.memo.get(key) is old:
                self.memo[key] = new

    recent_puts: tuple[int, ...] = ()

    def put(self, index: int) -> None:
        if index < 0:
            raise ValueError
        self.memo[index] = self.stack[-1]
        self.recent_puts = (*self.recent_puts[-7:], index)

    def set_items(self, target: Any, items: list[Any]) -> None:
        into = target.items if isinstance(target, Opaque) else target
        if not isinstance(into, dict):
            raise ValueError
        for at in range(0, len(items), 2):
            key = items[at]
            into[checked_key(key) if type(key) is tuple else key] = items[at + 1]

    def extend(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, Opaque):
            target.elements.extend(items)
        elif isinstance(target, list):
            target.extend(items)
        elif isinstance(target, set):
            target.update(checked_key(item) for item in items)
        else:
            raise ValueError

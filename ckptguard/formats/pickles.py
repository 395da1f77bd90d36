"""The pickle reader: a machine of our own that understands every opcode and resolves no name.

Globals become inert `Name` objects. Calls are made only to the exact names in `reconstruct.CALLS`, whose stand-ins are
ours and build plain data; any other call yields an inert `Opaque` and is written down, so that the check for unsafe
pickles judges exactly what the reader saw. Work and memory are bounded by the size of the input.
"""

from __future__ import annotations

import _compat_pickle
import codecs
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ckptguard.errors import FormatError
from ckptguard.model import GlobalUse, Tensor

MAX_INTEGER_BYTES = 4096
MAX_DEPTH = 256
_MARK = object()


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


Call = Callable[..., Any]
Persistent = Callable[[Any], Any]


def read_pickle(
    data: bytes | memoryview,
    *,
    start: int = 0,
    persistent: Persistent | None = None,
    calls: dict[str, Call] | None = None,
) -> Pickled:
    """Read the pickle at `start`. Raises FormatError (bad-header, truncated) and nothing else."""
    if calls is None:
        from ckptguard.formats.reconstruct import CALLS

        calls = CALLS
    machine = _Machine(bytes(data) if isinstance(data, memoryview) else data, start, persistent, calls)
    try:
        return machine.run()
    except FormatError:
        raise
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, struct.error, UnicodeError, AttributeError) as e:
        raise FormatError("bad-header", f"pickle is damaged near byte {machine.pos}: {type(e).__name__}") from e
    except (RecursionError, MemoryError) as e:
        raise FormatError("bad-header", f"pickle nests or grows beyond all measure near byte {machine.pos}") from e


def walk(tree: Any, *, limit: int = 20_000_000) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf of a tree with its path. Shared and circular parts are visited once per path, within `limit` nodes.

    Raises FormatError when the tree is larger or deeper than any checkpoint's.
    """
    stack: list[tuple[tuple[Any, ...], Any, frozenset[int]]] = [((), tree, frozenset())]
    visited = 0
    while stack:
        path, value, above = stack.pop()
        visited += 1
        if visited > limit:
            raise FormatError("bad-header", f"the object holds more than {limit} values")
        children = _children(value)
        if children is None:
            yield path, value
            continue
        if id(value) in above:
            continue
        if len(path) > MAX_DEPTH:
            raise FormatError("bad-header", f"the object is nested deeper than {MAX_DEPTH} levels")
        inside = above | {id(value)}
        stack.extend(((*path, key), child, inside) for key, child in reversed(children))


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, Opaque):
        inner: list[tuple[Any, Any]] = list(value.items.items())
        inner += enumerate(value.elements)
        inner += [(f"__args__.{i}", a) for i, a in enumerate(value.args) if isinstance(a, dict | list | tuple | Opaque | Tensor)]
        if isinstance(value.state, dict):
            inner += value.state.items()
        elif isinstance(value.state, tuple | list | Opaque):
            inner.append(("__state__", value.state))
        return inner
    return None


class _Machine:
    """The stack machine. One instance reads one pickle."""

    def __init__(self, data: bytes, start: int, persistent: Persistent | None, calls: dict[str, Call]) -> None:
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

    def run(self) -> Pickled:
        data, dispatch = self.data, _DISPATCH
        size = len(data)
        while self.pos < size:
            code = data[self.pos]
            self.pos += 1
            if code == 0x2E:  # STOP
                value = self.stack.pop()
                if value is _MARK:
                    raise ValueError
                uses = tuple(GlobalUse(name, how) for name, how in self.uses)
                return Pickled(value, uses, self.pos, self.protocol)
            handler = dispatch[code]
            if handler is None:
                raise FormatError("bad-header", f"byte {self.pos - 1} of the pickle, 0x{code:02x}, is no opcode")
            handler(self)
        raise FormatError("truncated", f"the pickle ends at byte {size} without its STOP")

    def take(self, count: int) -> bytes:
        end = self.pos + count
        if count < 0 or end > len(self.data):
            raise FormatError(
                "truncated", f"the pickle wants {count} bytes at {self.pos}, it has {len(self.data) - self.pos}"
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
        while stack[at] is not _MARK:
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
            return build(*args)
        except FormatError:
            raise
        except Exception as e:  # a stand-in given nonsense must not break the reader
            raise FormatError("bad-header", f"{function.full} has arguments that it cannot have ({type(e).__name__})") from e

    def new(self, cls: Any, args: Any, kwargs: Any = None) -> Any:
        if not isinstance(args, tuple):
            raise ValueError
        if not isinstance(cls, Name):
            self.note("an object that is no class", "called")
            return Opaque("?", args)
        build = self.calls.get(cls.full)
        if build is not None and not kwargs:
            self.note(cls.full, "allowed")
            self.spend(args)
            try:
                return build(*args)
            except Exception:  # NEWOBJ does not run __init__, so its arguments may differ from a call's
                return Opaque(cls.full, args)
        self.note(cls.full, "built")
        return Opaque(cls.full, args, items=dict(kwargs) if isinstance(kwargs, dict) else {})

    def spend(self, args: tuple[Any, ...]) -> None:
        for arg in args:
            if isinstance(arg, list | dict | tuple | set | bytes | bytearray | str):
                self.budget -= len(arg)
        if self.budget < 0:
            raise FormatError("bad-header", "the pickle copies its values over and over: a decompression bomb")

    def build(self, state: Any) -> None:
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target.state = state
            self.note(target.name, "built")
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
            into[items[at]] = items[at + 1]

    def extend(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, Opaque):
            target.elements.extend(items)
        elif isinstance(target, list):
            target.extend(items)
        elif isinstance(target, set):
            target.update(items)
        else:
            raise ValueError


# --- opcodes ------------------------------------------------------------------------------------------

Handler = Callable[[_Machine], None]
_DISPATCH: list[Handler | None] = [None] * 256


def _op(code: bytes) -> Callable[[Handler], Handler]:
    def keep(handler: Handler) -> Handler:
        _DISPATCH[code[0]] = handler
        return handler

    return keep


def _constant(code: bytes, value: Any) -> None:
    @_op(code)
    def push(m: _Machine) -> None:
        m.stack.append(value)


for _code, _value in ((b"N", None), (b"\x88", True), (b"\x89", False), (b")", ()), (b"(", _MARK)):
    _constant(_code, _value)


def _fresh(code: bytes, make: Callable[[], Any]) -> None:
    @_op(code)
    def push(m: _Machine) -> None:
        m.stack.append(make())


for _code, _make in ((b"]", list), (b"}", dict), (b"\x8f", set)):
    _fresh(_code, _make)


def _packed(code: bytes, layout: str) -> None:
    shape = struct.Struct(layout)

    @_op(code)
    def push(m: _Machine) -> None:
        m.stack.append(shape.unpack(m.take(shape.size))[0])


for _code, _layout in ((b"J", "<i"), (b"K", "<B"), (b"M", "<H"), (b"G", ">d")):
    _packed(_code, _layout)


def _sized(code: bytes, layout: str, convert: Callable[[bytes], Any]) -> None:
    shape = struct.Struct(layout)

    @_op(code)
    def push(m: _Machine) -> None:
        m.stack.append(convert(m.take(shape.unpack(m.take(shape.size))[0])))


def _text(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _latin(raw: bytes) -> str | bytes:
    # Python 2 strings: text where they are ASCII (names, keys), else bytes (packed arrays).
    return raw.decode("ascii") if raw.isascii() else raw


def _integer(raw: bytes) -> int:
    if len(raw) > MAX_INTEGER_BYTES:
        raise FormatError("bad-header", f"an integer of {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


for _code, _layout, _convert in (
    (b"X", "<I", _text),
    (b"\x8c", "<B", _text),
    (b"\x8d", "<Q", _text),
    (b"B", "<I", bytes),
    (b"C", "<B", bytes),
    (b"\x8e", "<Q", bytes),
    (b"\x96", "<Q", bytearray),
    (b"T", "<i", _latin),
    (b"U", "<B", _latin),
    (b"\x8a", "<B", _integer),
    (b"\x8b", "<i", _integer),
):
    _sized(_code, _layout, _convert)  # type: ignore[arg-type]


@_op(b"\x80")
def _proto(m: _Machine) -> None:
    m.protocol = m.take(1)[0]
    if m.protocol > 5:
        raise FormatError("bad-header", f"pickle protocol {m.protocol} does not exist")


@_op(b"\x95")
def _frame(m: _Machine) -> None:
    length = struct.unpack("<Q", m.take(8))[0]
    if length > len(m.data) - m.pos:
        raise FormatError("truncated", f"a frame of {length} bytes at {m.pos}, {len(m.data) - m.pos} are there")


@_op(b"0")
def _pop(m: _Machine) -> None:
    m.stack.pop()


@_op(b"1")
def _pop_mark(m: _Machine) -> None:
    m.since_mark()


@_op(b"2")
def _dup(m: _Machine) -> None:
    m.stack.append(m.stack[-1])


@_op(b"I")
def _int(m: _Machine) -> None:
    text = m.line()
    m.stack.append({b"00": False, b"01": True}.get(text, None) if text in (b"00", b"01") else int(text))


@_op(b"L")
def _long(m: _Machine) -> None:
    m.stack.append(int(m.line().rstrip(b"L")))


@_op(b"F")
def _float(m: _Machine) -> None:
    m.stack.append(float(m.line()))


@_op(b"S")
def _string(m: _Machine) -> None:
    text = m.line().strip()
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise ValueError
    m.stack.append(_latin(codecs.escape_decode(text[1:-1])[0]))  # type: ignore[attr-defined]


@_op(b"V")
def _unicode(m: _Machine) -> None:
    m.stack.append(str(m.line(), "raw-unicode-escape"))


@_op(b"P")
def _persid(m: _Machine) -> None:
    _persist(m, m.line().decode("ascii"))


@_op(b"Q")
def _binpersid(m: _Machine) -> None:
    _persist(m, m.stack.pop())


def _persist(m: _Machine, pid: Any) -> None:
    if m.persistent is None:
        m.note("a persistent id outside of a torch file", "called")
        m.stack.append(Opaque("persistent id", (pid,)))
    else:
        m.stack.append(m.persistent(pid))


@_op(b"t")
def _tuple(m: _Machine) -> None:
    m.stack.append(tuple(m.since_mark()))


def _tuple_of(code: bytes, count: int) -> None:
    @_op(code)
    def push(m: _Machine) -> None:
        items = m.stack[-count:]
        if len(items) < count or _MARK in items:
            raise ValueError
        m.stack[-count:] = [tuple(items)]


for _code, _count in ((b"\x85", 1), (b"\x86", 2), (b"\x87", 3)):
    _tuple_of(_code, _count)


@_op(b"l")
def _list(m: _Machine) -> None:
    m.stack.append(m.since_mark())


@_op(b"d")
def _dict(m: _Machine) -> None:
    items = m.since_mark()
    made: dict[Any, Any] = {}
    m.set_items(made, items)
    m.stack.append(made)


@_op(b"\x91")
def _frozenset(m: _Machine) -> None:
    m.stack.append(frozenset(m.since_mark()))


@_op(b"a")
def _append(m: _Machine) -> None:
    item = m.stack.pop()
    m.extend(m.stack[-1], [item])


@_op(b"e")
def _appends(m: _Machine) -> None:
    items = m.since_mark()
    m.extend(m.stack[-1], items)


@_op(b"\x90")
def _additems(m: _Machine) -> None:
    items = m.since_mark()
    m.extend(m.stack[-1], items)


@_op(b"s")
def _setitem(m: _Machine) -> None:
    value = m.stack.pop()
    key = m.stack.pop()
    m.set_items(m.stack[-1], [key, value])


@_op(b"u")
def _setitems(m: _Machine) -> None:
    items = m.since_mark()
    m.set_items(m.stack[-1], items)


@_op(b"p")
def _put(m: _Machine) -> None:
    m.put(int(m.line()))


@_op(b"q")
def _binput(m: _Machine) -> None:
    m.put(m.take(1)[0])


@_op(b"r")
def _long_binput(m: _Machine) -> None:
    m.put(struct.unpack("<I", m.take(4))[0])


@_op(b"\x94")
def _memoize(m: _Machine) -> None:
    m.put(len(m.memo))


@_op(b"g")
def _get(m: _Machine) -> None:
    m.stack.append(m.memo[int(m.line())])


@_op(b"h")
def _binget(m: _Machine) -> None:
    m.stack.append(m.memo[m.take(1)[0]])


@_op(b"j")
def _long_binget(m: _Machine) -> None:
    m.stack.append(m.memo[struct.unpack("<I", m.take(4))[0]])


@_op(b"c")
def _global(m: _Machine) -> None:
    module = m.line().decode("utf-8")
    m.stack.append(m.name(module, m.line().decode("utf-8")))


@_op(b"\x93")
def _stack_global(m: _Machine) -> None:
    name = m.stack.pop()
    module = m.stack.pop()
    if not (isinstance(name, str) and isinstance(module, str)):
        raise ValueError
    m.stack.append(m.name(module, name))


def _extension(code: bytes, layout: str) -> None:
    shape = struct.Struct(layout)

    @_op(code)
    def push(m: _Machine) -> None:
        number = shape.unpack(m.take(shape.size))[0]
        # What a registered extension code means is known to the loading process alone.
        m.note(f"extension code {number}", "called")
        m.stack.append(Name(f"extension code {number}"))


for _code, _layout in ((b"\x82", "<B"), (b"\x83", "<H"), (b"\x84", "<i")):
    _extension(_code, _layout)


@_op(b"R")
def _reduce(m: _Machine) -> None:
    args = m.stack.pop()
    function = m.stack.pop()
    m.stack.append(m.call(function, args))


@_op(b"b")
def _build(m: _Machine) -> None:
    m.build(m.stack.pop())


@_op(b"\x81")
def _newobj(m: _Machine) -> None:
    args = m.stack.pop()
    cls = m.stack.pop()
    m.stack.append(m.new(cls, args))


@_op(b"\x92")
def _newobj_ex(m: _Machine) -> None:
    kwargs = m.stack.pop()
    args = m.stack.pop()
    cls = m.stack.pop()
    m.stack.append(m.new(cls, args, kwargs))


@_op(b"i")
def _inst(m: _Machine) -> None:
    module = m.line().decode("utf-8")
    name = m.line().decode("utf-8")
    args = tuple(m.since_mark())
    m.stack.append(m.call(m.name(module, name), args))


@_op(b"o")
def _obj(m: _Machine) -> None:
    items = m.since_mark()
    m.stack.append(m.call(items[0], tuple(items[1:])))


def _out_of_band(m: _Machine) -> None:
    raise FormatError("bad-header", "the pickle refers to buffers that are kept outside of it")


_DISPATCH[0x97] = _out_of_band
_DISPATCH[0x98] = _out_of_band

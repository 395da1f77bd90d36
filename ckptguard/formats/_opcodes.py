"""Every opcode of the pickle protocols 0 to 5, as the standard unpickler means it (Lib/pickletools.py describes each)."""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any

from ckptguard.errors import FormatError
from ckptguard.formats._inert import Name, Opaque, checked_key
from ckptguard.formats._machine import MARK, Machine

MAX_INTEGER_BYTES = 4096

Handler = Callable[[Machine], None]
DISPATCH: list[Handler | None] = [None] * 256


def _op(code: bytes) -> Callable[[Handler], Handler]:
    def keep(handler: Handler) -> Handler:
        DISPATCH[code[0]] = handler
        return handler

    return keep


def _constant(code: bytes, value: Any) -> None:
    @_op(code)
    def push(m: Machine) -> None:
        m.stack.append(value)


for _code, _value in ((b"N", None), (b"\x88", True), (b"\x89", False), (b")", ()), (b"(", MARK)):
    _constant(_code, _value)


def _fresh(code: bytes, make: Callable[[], Any]) -> None:
    @_op(code)
    def push(m: Machine) -> None:
        m.stack.append(make())


for _code, _make in ((b"]", list), (b"}", dict), (b"\x8f", set)):
    _fresh(_code, _make)


def _packed(code: bytes, layout: str) -> None:
    shape = struct.Struct(layout)

    @_op(code)
    def push(m: Machine) -> None:
        m.stack.append(shape.unpack(m.take(shape.size))[0])


for _code, _layout in ((b"J", "<i"), (b"K", "<B"), (b"M", "<H"), (b"G", ">d")):
    _packed(_code, _layout)


def _sized(code: bytes, layout: str, convert: Callable[[bytes], Any]) -> None:
    shape = struct.Struct(layout)

    @_op(code)
    def push(m: Machine) -> None:
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
def _proto(m: Machine) -> None:
    m.protocol = m.take(1)[0]
    if m.protocol > 5:
        raise FormatError("bad-header", f"pickle protocol {m.protocol} does not exist")


@_op(b"\x95")
def _frame(m: Machine) -> None:
    length = struct.unpack("<Q", m.take(8))[0]
    if length > len(m.data) - m.pos:
        raise FormatError(
            "truncated", f"a frame of {length} bytes at {m.pos}, {len(m.data) - m.pos} are there"
        )


@_op(b"0")
def _pop(m: Machine) -> None:
    m.stack.pop()


@_op(b"1")
def _pop_mark(m: Machine) -> None:
    m.since_mark()


@_op(b"2")
def _dup(m: Machine) -> None:
    m.stack.append(m.stack[-1])


@_op(b"I")
def _int(m: Machine) -> None:
    text = m.line()
    m.stack.append({b"00": False, b"01": True}.get(text) if text in (b"00", b"01") else int(text))


@_op(b"L")
def _long(m: Machine) -> None:
    m.stack.append(int(m.line().rstrip(b"L")))


@_op(b"F")
def _float(m: Machine) -> None:
    m.stack.append(float(m.line()))


@_op(b"S")
def _string(m: Machine) -> None:
    text = m.line().strip()
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise ValueError
    m.stack.append(_latin(codecs.escape_decode(text[1:-1])[0]))  # type: ignore[attr-defined]


@_op(b"V")
def _unicode(m: Machine) -> None:
    m.stack.append(str(m.line(), "raw-unicode-escape"))


@_op(b"P")
def _persid(m: Machine) -> None:
    _persist(m, m.line().decode("ascii"))


@_op(b"Q")
def _binpersid(m: Machine) -> None:
    _persist(m, m.stack.pop())


def _persist(m: Machine, pid: Any) -> None:
    if m.persistent is None:
        m.note("a persistent id outside of a torch file", "called")
        m.stack.append(Opaque("persistent id", (pid,)))
    else:
        m.stack.append(m.persistent(pid))


@_op(b"t")
def _tuple(m: Machine) -> None:
    m.stack.append(tuple(m.since_mark()))


def _tuple_of(code: bytes, count: int) -> None:
    @_op(code)
    def push(m: Machine) -> None:
        items = m.stack[-count:]
        # Not `MARK in items`: comparing an array with anything gives an array.
        if len(items) < count or any(item is MARK for item in items):
            raise ValueError
        m.stack[-count:] = [tuple(items)]


for _code, _count in ((b"\x85", 1), (b"\x86", 2), (b"\x87", 3)):
    _tuple_of(_code, _count)


@_op(b"l")
def _list(m: Machine) -> None:
    m.stack.append(m.since_mark())


@_op(b"d")
def _dict(m: Machine) -> None:
    items = m.since_mark()
    made: dict[Any, Any] = {}
    m.set_items(made, items)
    m.stack.append(made)


@_op(b"\x91")
def _frozenset(m: Machine) -> None:
    m.stack.append(frozenset(checked_key(item) for item in m.since_mark()))


@_op(b"a")
def _append(m: Machine) -> None:
    item = m.stack.pop()
    m.extend(m.stack[-1], [item])


@_op(b"e")
def _appends(m: Machine) -> None:
    items = m.since_mark()
    m.extend(m.stack[-1], items)


@_op(b"\x90")
def _additems(m: Machine) -> None:
    items = m.since_mark()
    m.extend(m.stack[-1], items)


@_op(b"s")
def _setitem(m: Machine) -> None:
    value = m.stack.pop()
    key = m.stack.pop()
    m.set_items(m.stack[-1], [key, value])


@_op(b"u")
def _setitems(m: Machine) -> None:
    items = m.since_mark()
    m.set_items(m.stack[-1], items)


@_op(b"p")
def _put(m: Machine) -> None:
    m.put(int(m.line()))


@_op(b"q")
def _binput(m: Machine) -> None:
    m.put(m.take(1)[0])


@_op(b"r")
def _long_binput(m: Machine) -> None:
    m.put(struct.unpack("<I", m.take(4))[0])


@_op(b"\x94")
def _memoize(m: Machine) -> None:
    m.put(len(m.memo))


@_op(b"g")
def _get(m: Machine) -> None:
    m.stack.append(m.memo[int(m.line())])


@_op(b"h")
def _binget(m: Machine) -> None:
    m.stack.append(m.memo[m.take(1)[0]])


@_op(b"j")
def _long_binget(m: Machine) -> None:
    m.stack.append(m.memo[struct.unpack("<I", m.take(4))[0]])


@_op(b"c")
def _global(m: Machine) -> None:
    module = m.line().decode("utf-8")
    m.stack.append(m.name(module, m.line().decode("utf-8")))


@_op(b"\x93")
def _stack_global(m: Machine) -> None:
    name = m.stack.pop()
    module = m.stack.pop()
    if not (isinstance(name, str) and isinstance(module, str)):
        raise ValueError
    m.stack.append(m.name(module, name))


def _extension(code: bytes, layout: str) -> None:
    shape = struct.Struct(layout)

    @_op(code)
    def push(m: Machine) -> None:
        number = shape.unpack(m.take(shape.size))[0]
        # What a registered extension code means is known to the loading process alone.
        m.note(f"extension code {number}", "called")
        m.stack.append(Name(f"extension code {number}"))


for _code, _layout in ((b"\x82", "<B"), (b"\x83", "<H"), (b"\x84", "<i")):
    _extension(_code, _layout)


@_op(b"R")
def _reduce(m: Machine) -> None:
    args = m.stack.pop()
    function = m.stack.pop()
    m.stack.append(m.call(function, args))


@_op(b"b")
def _build(m: Machine) -> None:
    m.build(m.stack.pop())


@_op(b"\x81")
def _newobj(m: Machine) -> None:
    args = m.stack.pop()
    cls = m.stack.pop()
    m.stack.append(m.new(cls, args))


@_op(b"\x92")
def _newobj_ex(m: Machine) -> None:
    kwargs = m.stack.pop()
    args = m.stack.pop()
    cls = m.stack.pop()
    m.stack.append(m.new(cls, args, kwargs))


@_op(b"i")
def _inst(m: Machine) -> None:
    module = m.line().decode("utf-8")
    name = m.line().decode("utf-8")
    args = tuple(m.since_mark())
    m.stack.append(m.call(m.name(module, name), args))


@_op(b"o")
def _obj(m: Machine) -> None:
    items = m.since_mark()
    m.stack.append(m.call(items[0], tuple(items[1:])))


def _out_of_band(m: Machine) -> None:
    raise FormatError("bad-header", "the pickle refers to buffers that are kept outside of it")


DISPATCH[0x97] = _out_of_band
DISPATCH[0x98] = _out_of_band

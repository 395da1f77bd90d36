"""Pickles and torch archives that lie inside byte values: what a framework unpickles a second time after loading.

torchtitan keeps each data loader's state as pickled bytes inside an item, Transformer Engine its `_extra_state` in a BytesIO.
Whoever loads the checkpoint executes those as well, so they are read and judged as the pickles around them are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from ckptguard.errors import FormatError
from ckptguard.formats._base import Parsed, Source
from ckptguard.formats.pickles import Opaque, names_used, read_pickle, walk
from ckptguard.model import GlobalUse
from ckptguard.ports import Store, Traits

MOST = 64 << 20
DEEPEST = 4


class _Memory:
    """The store of bytes that need no store: joining reads costs nothing."""

    traits = Traits(request_bytes=MOST)


_MEMORY = cast("Store", _Memory())


class Held(Source):
    """A source whose bytes were read already."""

    def __init__(self, data: bytes) -> None:
        super().__init__(_MEMORY, "", len(data))
        self.data = data

    def read(self, start: int, length: int) -> bytes:
        if start < 0 or length < 0 or start + length > self.size:
            raise FormatError(
                "truncated", f"bytes {start} to {start + length} are wanted, {self.size} are there"
            )
        return self.data[start : start + length]

    def part(self, start: int, length: int) -> Source:
        return Held(self.read(start, length))


def nested(tree: Any, depth: int = 0) -> Iterator[tuple[Any, tuple[GlobalUse, ...]]]:
    """(what it holds, the names it uses) of every pickle or archive inside the byte values of a tree."""
    if depth >= DEEPEST:
        return
    for _, leaf in walk(tree):
        raw = _bytes(leaf)
        if raw is None:
            continue
        opened = _open(raw)
        if opened is not None:
            yield opened
            yield from nested(opened[0], depth + 1)


def with_nested(parsed: Parsed) -> Parsed:
    """The same with the names that pickles inside its byte values use."""
    inner = dict.fromkeys(use for _, uses in nested(parsed.tree) for use in uses)
    return replace(parsed, globals=tuple({**dict.fromkeys(parsed.globals), **inner})) if inner else parsed


def decoded(value: Any) -> Any:
    """What a byte value holds when it is a pickle or an archive, else the value itself."""
    raw = _bytes(value)
    opened = _open(raw) if raw is not None else None
    return value if opened is None else opened[0]


def _bytes(value: Any) -> bytes | None:
    if isinstance(value, Opaque) and value.name in ("_io.BytesIO", "io.BytesIO"):
        content = (
            value.state[0]
            if isinstance(value.state, tuple) and value.state
            else value.args[0]
            if value.args
            else None
        )
        value = content
    if isinstance(value, bytes | bytearray) and 4 <= len(value) <= MOST:
        return bytes(value)
    return None


def _open(raw: bytes) -> tuple[Any, tuple[GlobalUse, ...]] | None:
    try:
        if raw.startswith(b"PK\x03\x04"):
            from ckptguard.formats import torch_zip

            archive: Parsed = torch_zip.read(Held(raw))
            return archive.tree, archive.globals
        if raw[-1:] == b"." or (raw[:1] == b"\x80" and raw[1] <= 5):
            pickled = read_pickle(raw)
            # Text that happens to end in a full stop may parse as an old pickle; without any name it does nothing.
            if raw[:1] == b"\x80" or pickled.globals:
                return pickled.value, pickled.globals
    except FormatError:
        pass
    if raw[:1] in (b"\x80", b"c", b"("):
        # Broken further on, and yet what comes before has run by then.
        uses = names_used(raw)
        if any(use.how in ("called", "enum") for use in uses):
            return None, uses
    return None

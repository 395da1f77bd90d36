"""TensorBoard event files, read with the standard library: records of length, checksum, protocol buffer, checksum.

Only scalars are read; everything else is skipped by its length. A torn last record ends the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import groupby

from ckptguard.logs._base import row_of
from ckptguard.model import LogRow

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DT_FLOAT, _DT_DOUBLE = 1, 2


class TensorBoard:
    """`events.out.tfevents.*`. Tags of one step become one row."""

    name = "tensorboard"

    def claims(self, name: str) -> bool:
        return ".tfevents." in name or name.endswith(".tfevents")

    def rows(self, data: bytes) -> tuple[LogRow, ...]:
        """One row for every run of events with the same step, in the order of the file. Never raises."""
        rows = []
        for step, events in groupby(_scalars(data), key=lambda event: event[1]):
            values: dict[str, float] = {"step": step}
            for time, _, scalars in events:
                for tag, value in scalars:
                    # A tag may be called "step" itself; the event's own step is the one that counts.
                    if tag != "step":
                        values[tag] = value
                values.setdefault("time", time)
            row = row_of(values)
            if row is not None:
                rows.append(row)
        return tuple(rows)


def _scalars(data: bytes) -> Iterator[tuple[float, int, list[tuple[str, float]]]]:
    """(wall time, step, scalars) of every event that has scalars."""
    for record in _records(data):
        time, step, scalars = 0.0, 0, []
        try:
            for field, value in _fields(record):
                if field == 1 and isinstance(value, bytes) and len(value) == 8:
                    (time,) = struct.unpack("<d", value)
                elif field == 2 and isinstance(value, int):
                    step = value
                elif field == 5 and isinstance(value, bytes):
                    scalars = list(_summary(value))
        except _Torn:
            continue
        if scalars:
            yield time, step, scalars


def _records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        if length > len(data) - at - 16:
            return
        yield data[at + 12 : at + 12 + length]
        at += 16 + length


def _summary(message: bytes) -> Iterator[tuple[str, float]]:
    for field, value in _fields(message):
        if field != 1 or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, content in _fields(value):
            if inner == 1 and isinstance(content, bytes):
                tag = content.decode("utf-8", errors="replace")
            elif inner == 2 and isinstance(content, bytes) and len(content) == 4:
                (scalar,) = struct.unpack("<f", content)
            elif inner == 8 and isinstance(content, bytes):
                scalar = _tensor(content)
        if tag and scalar is not None:
            yield tag, scalar


def _tensor(message: bytes) -> float | None:
    """The number in a scalar tensor, as TensorFlow 2 writes its scalars."""
    dtype, content, number = 0, b"", None
    for field, value in _fields(message):
        if field == 1 and isinstance(value, int):
            dtype = value
        elif field == 4 and isinstance(value, bytes):
            content = value
        elif field == 5 and isinstance(value, bytes) and len(value) == 4:
            (number,) = struct.unpack("<f", value)
        elif field == 6 and isinstance(value, bytes) and len(value) == 8:
            (number,) = struct.unpack("<d", value)
    if number is None and dtype == _DT_FLOAT and len(content) == 4:
        (number,) = struct.unpack("<f", content)
    if number is None and dtype == _DT_DOUBLE and len(content) == 8:
        (number,) = struct.unpack("<d", content)
    return number


class _Torn(Exception):
    """A message that ends too early, or that uses a wire type which nobody writes."""


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protocol buffer: integers for varints, bytes for everything else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield field, value
            continue
        if wire == _BYTES:
            length, at = _varint(message, at)
        elif wire == _FIXED64:
            length = 8
        elif wire == _FIXED32:
            length = 4
        else:
            raise _Torn
        if length > len(message) - at:
            raise _Torn
        yield field, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise _Torn
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _Torn

"""OCDBT, the store that orbax (TensorStore) writes: `manifest.ocdbt`, and data files of values with tree nodes behind them.

Manifest and nodes carry their length and a CRC-32C of themselves; values (zstd frames) carry none. Layout: TensorStore's
description of the OCDBT database format. Nodes are compressed and are not looked into.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.errors import FormatError
from ckptguard.formats._base import Parsed, Source
from ckptguard.model import Problem

MANIFEST = b"\x0c\xdb\x3a\x2a"
NODE = b"\x0c\xdb\x20\xde"
VERSIONS = b"\x0c\xdb\x12\x34"
HEADER = 12
TAIL = (
    1 << 20
)  # nodes come behind the values that they refer to: how far from its end a large file is searched


def read(source: Source) -> Parsed:
    """Verify what carries a checksum. Raises FormatError (empty-file, truncated, bad-header, crc-mismatch), StoreError."""
    if source.size == 0:
        raise FormatError(
            "empty-file", "0 bytes: the save was interrupted, or the disk lost power before it wrote"
        )
    head = source.read(0, min(HEADER, source.size))
    if head.startswith(MANIFEST):
        return _manifest(source, head)
    if source.key.endswith("manifest.ocdbt"):
        raise FormatError(
            "bad-header", f"it does not begin like a manifest (first bytes {head[:4].hex(' ')})"
        )
    start = max(0, source.size - TAIL)
    tail = source.read(start, source.size - start)
    problems, proven = [], 0
    for at, length in _nodes(tail):
        if _sound(tail[at : at + length]):
            proven += length
        else:
            problems.append(
                Problem(
                    "crc-mismatch",
                    f"node at byte {start + at}",
                    f"CRC-32C of the tree node of {length} bytes at {start + at} is not the one it carries",
                )
            )
    if head.startswith(NODE) and not proven and not problems:
        raise FormatError(
            "truncated",
            f"its tree node has {int.from_bytes(head[4:], 'little')} bytes, the file {source.size}",
        )
    return Parsed("ocdbt", problems=tuple(problems), proven=proven)


def _manifest(source: Source, head: bytes) -> Parsed:
    length = int.from_bytes(head[4:], "little")
    if len(head) < HEADER or length > source.size:
        raise FormatError(
            "truncated", f"the manifest has {length} bytes by its own word, the file {source.size}"
        )
    if length < HEADER + 4 or length > 64 << 20:
        raise FormatError("bad-header", f"the manifest claims {length} bytes")
    if not _sound(source.read(0, length)):
        raise FormatError(
            "crc-mismatch", f"CRC-32C of the manifest of {length} bytes is not the one it carries"
        )
    extra = source.size - length
    problems = (
        (Problem("unindexed-tensor", "", f"{extra} bytes follow the end of the manifest"),) if extra else ()
    )
    return Parsed("ocdbt", problems=problems, proven=length)


def _nodes(data: bytes) -> Iterator[tuple[int, int]]:
    """Tree nodes that lie whole in the data. Values are compressed, so a signature that is none is followed by nonsense."""
    at = 0
    while (at := data.find(b"\x0c\xdb", at)) >= 0:
        length = int.from_bytes(data[at + 4 : at + HEADER], "little")
        if (
            data[at : at + 4] in (NODE, VERSIONS)
            and HEADER + 4 < length <= len(data) - at
            and data[at + HEADER : at + HEADER + 1] in (b"\0", b"\1")
        ):
            yield at, length
            at += length
        else:
            at += 2


def _sound(blob: bytes) -> bool:
    return crc32c(blob[:-4]) == int.from_bytes(blob[-4:], "little")


def _table() -> tuple[int, ...]:
    rows = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        rows.append(value)
    return tuple(rows)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), byte by byte: manifests and nodes are small."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF

"""Zip archives of stored records, as torch and other writers lay them out: directory, headers, padding, descriptors.

Structures: PKWARE APPNOTE 6.3 (local header, data descriptor, central directory, zip64). Readers disagree where an archive
contradicts itself, so an archive that does is not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from ckptguard.errors import FormatError
from ckptguard.formats._base import Source, Span
from ckptguard.model import Problem

LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")
LARGE = 0xFFFFFFFF
MAX_RECORDS = 5_000_000
ALIGNMENT = 64
MAX_GAP = 1 << 20  # a header with the longest name and padding, and a descriptor


@dataclass(frozen=True, slots=True)
class Record:
    """One record. `start` is where its payload begins; `aligned` that this was computed, not yet read."""

    name: str
    header: int
    size: int
    crc: int
    flags: int
    raw_name: bytes
    start: int = 0
    aligned: bool = True

    @property
    def span(self) -> Span:
        # CRC 0 on a payload means that none was computed (set_crc32_options(False)): missing evidence, no fault.
        return Span(self.start, self.size, None if self.crc == 0 and self.size else self.crc, self.name)


@dataclass(frozen=True, slots=True)
class Archive:
    """The central directory of one archive. `end` is where the archive ends, `directory` where its directory begins."""

    records: Mapping[str, Record]
    directory: int
    end: int
    root: str

    def get(self, name: str) -> Record | None:
        return self.records.get(f"{self.root}/{name}")


def read_archive(source: Source) -> Archive:
    """Read the end records and the central directory. Raises FormatError (truncated, bad-header, out-of-bounds)."""
    size = source.size
    if size < END.size:
        raise FormatError("truncated", f"{size} bytes are too few for a zip archive")
    at, tail, base = _find_end(source)
    _, disk, _, _, count, length, offset, comment = END.unpack_from(tail, at - base)
    end = at + END.size + comment
    if count == 0xFFFF or length == LARGE or offset == LARGE or _has_locator(tail, at - base):
        short, (count, length, offset) = (count, length, offset), _read_end64(source, tail, at, base)
        if any(
            a not in (b, most) for a, b, most in zip(short, (count, length, offset), (0xFFFF, LARGE, LARGE))
        ):
            raise FormatError("bad-header", "the two end records of the archive disagree")
        behind = LOCATOR.unpack_from(tail, at - base - LOCATOR.size)[2]
    else:
        behind = at
    if disk not in (0, 0xFFFF):
        raise FormatError("bad-header", "the archive claims to be split over several disks")
    if offset + length > at:
        raise FormatError(
            "out-of-bounds",
            f"the central directory of {length} bytes at {offset} reaches past its end record at {at}",
        )
    if offset + length != behind:
        raise FormatError(
            "bad-header",
            f"the central directory ends at byte {offset + length}, what comes behind it begins at {behind}",
        )
    if count > MAX_RECORDS or count * CENTRAL.size > length:
        raise FormatError(
            "bad-header", f"the archive claims {count} records in a directory of {length} bytes"
        )
    directory = (
        tail[offset - base : offset - base + length] if offset >= base else source.read(offset, length)
    )
    records = _read_directory(directory, count, offset)
    first = next(iter(records), "")
    root, slash, _ = first.partition("/")
    if not slash:
        raise FormatError(
            "bad-header", f"the first record, {first!r}, lies in no folder: not written by torch.save"
        )
    return Archive(records, offset, end, root)


def _find_end(source: Source) -> tuple[int, bytes, int]:
    """(offset of the end record, tail bytes, offset of the tail). Looks further back only if it has to."""
    for reach in (2048, 70_000):
        base = max(0, source.size - reach)
        tail = source.read(base, source.size - base)
        at = tail.rfind(b"PK\x05\x06")
        while at >= 0:
            if at + END.size <= len(tail):
                return base + at, tail, base
            at = tail.rfind(b"PK\x05\x06", 0, at)
        if base == 0:
            break
    raise FormatError(
        "truncated",
        f"the archive of {source.size} bytes has no end record: it was cut short, or overwritten at its end",
    )


def _has_locator(tail: bytes, at: int) -> bool:
    return at >= LOCATOR.size and tail[at - LOCATOR.size : at - LOCATOR.size + 4] == b"PK\x06\x07"


def _read_end64(source: Source, tail: bytes, at: int, base: int) -> tuple[int, int, int]:
    if not _has_locator(tail, at - base):
        raise FormatError("bad-header", "the end record refers to a zip64 record that is not there")
    _, _, where, _ = LOCATOR.unpack_from(tail, at - base - LOCATOR.size)
    if where + END64.size > at:
        raise FormatError(
            "out-of-bounds", f"the zip64 end record is said to lie at byte {where}, past byte {at}"
        )
    raw = tail[where - base : where - base + END64.size] if where >= base else source.read(where, END64.size)
    signature, _, _, _, _, _, here, count, length, offset = END64.unpack(raw)
    if signature != b"PK\x06\x06" or here != count:
        raise FormatError("bad-header", f"no zip64 end record at byte {where}")
    return count, length, offset


def _read_directory(raw: bytes, count: int, limit: int) -> dict[str, Record]:
    records: dict[str, Record] = {}
    at = 0
    for _ in range(count):
        if at + CENTRAL.size > len(raw):
            raise FormatError(
                "bad-header", f"the central directory ends after {len(records)} of {count} records"
            )
        (sig, _, _, flags, method, _, _, crc, packed, size, n, extra, comment, _, _, _, header) = (
            CENTRAL.unpack_from(raw, at)
        )
        if sig != b"PK\x01\x02":
            raise FormatError(
                "bad-header", f"entry {len(records)} of the central directory has a damaged signature"
            )
        name_end = at + CENTRAL.size + n
        raw_name = raw[at + CENTRAL.size : name_end]
        size, packed, header = _zip64(raw[name_end : name_end + extra], size, packed, header)
        name = raw_name.decode("utf-8", "replace")
        if method != 0 or packed != size:
            raise FormatError(
                "bad-header", f"record {name} is compressed; torch.save stores its records as they are"
            )
        if name.startswith("/") or ".." in name.split("/") or "\\" in name:
            raise FormatError("bad-header", f"record {name!r} would lie outside of the archive's folder")
        if name in records:
            raise FormatError(
                "bad-header", f"record {name} is there twice: readers would disagree on which one counts"
            )
        start = _payload_start(header, n, size)
        if header + LOCAL.size + n + size > limit:
            raise FormatError(
                "out-of-bounds",
                f"record {name} of {size} bytes at {header} reaches into the central directory at {limit}",
            )
        records[name] = Record(name, header, size, crc, flags, raw_name, start)
        at = name_end + extra + comment
    if at != len(raw):
        raise FormatError(
            "bad-header", f"the central directory of {len(raw)} bytes ends at byte {at} with its last record"
        )
    ordered = sorted(records.values(), key=lambda r: r.header)
    for one, two in pairwise(ordered):
        if one.header + LOCAL.size + len(one.raw_name) + one.size > two.header:
            raise FormatError("out-of-bounds", f"records {one.name} and {two.name} overlap")
    return records


def _zip64(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = [struct.unpack_from("<Q", extra, at + 4 + i)[0] for i in range(0, length - 7, 8)]
            if size == LARGE and numbers:
                size = numbers.pop(0)
            if packed == LARGE and numbers:
                packed = numbers.pop(0)
            if header == LARGE and numbers:
                header = numbers.pop(0)
        at += 4 + length
    return size, packed, header


def _payload_start(header: int, name_length: int, size: int) -> int:
    """Where torch's writer puts a payload: behind the header, name and a padding field, at a multiple of 64."""
    start = header + LOCAL.size + name_length + 4
    if size >= LARGE or header >= LARGE:
        start += 4 + (16 if size >= LARGE else 0) + (8 if header >= LARGE else 0)
    return -(-start // ALIGNMENT) * ALIGNMENT


def local_start(record: Record, raw: bytes) -> int:
    """The payload's real start by its local header (`raw`, from the header on). Raises FormatError where they disagree."""
    if len(raw) < LOCAL.size:
        raise FormatError("truncated", f"the local header of {record.name} is cut short")
    sig, _, flags, method, _, _, crc, _, size, n, extra = LOCAL.unpack_from(raw)
    if sig != b"PK\x03\x04":
        raise FormatError("bad-header", f"record {record.name}: no local header at byte {record.header}")
    name = raw[LOCAL.size : LOCAL.size + n]
    if name != record.raw_name or method != 0:
        raise FormatError(
            "bad-header",
            f"record {record.name} is called {name.decode('utf-8', 'replace')!r} in its local header",
        )
    if not flags & 8 and (crc != record.crc or size not in (record.size, LARGE)):
        raise FormatError(
            "bad-header", f"record {record.name}: local header and central directory disagree on size or CRC"
        )
    return record.header + LOCAL.size + int(n) + int(extra)


def settle(source: Source, records: Iterable[Record]) -> dict[str, Record]:
    """The same records with their payload starts read from the local headers: for archives not laid out by torch."""
    settled = {}
    for record in records:
        raw = source.read(record.header, min(LOCAL.size + len(record.raw_name), source.size - record.header))
        settled[record.name] = replace(record, start=local_start(record, raw), aligned=False)
    return settled


# --- the structure between the payloads ---------------------------------------------------------------


def gaps_of(archive: Archive) -> Iterable[tuple[int, int]]:
    at = 0
    for record in sorted(archive.records.values(), key=lambda r: r.header):
        if 0 < record.start - at <= MAX_GAP:
            yield at, record.start - at
        at = record.start + record.size
    if archive.directory > at:
        yield at, min(MAX_GAP, archive.directory - at)


def unnamed(archive: Archive) -> Iterable[Problem]:
    """Stretches between records that are too long to be headers and padding."""
    at = 0
    for record in sorted(archive.records.values(), key=lambda r: r.header):
        if record.start - at > MAX_GAP:
            yield Problem(
                "unindexed-tensor",
                record.name,
                f"{record.start - at} bytes before {record.name} are no part of the archive",
            )
        at = record.start + record.size


def verify_gaps(archive: Archive, found: Mapping[int, bytes], base: int = 0) -> Iterable[Problem]:
    """Check local headers, their padding and the data descriptors against the central directory."""
    at = 0
    before: Record | None = None
    for record in sorted(archive.records.values(), key=lambda r: r.header):
        gap = found.get(at + base)
        if gap is not None:
            yield from _verify_gap(gap, at, before, record)
        at = record.start + record.size
        before = record
    gap = found.get(at + base)
    if gap is not None and before is not None and before.flags & 8 and before.size:
        yield from _verify_descriptor(gap, before)


def _verify_gap(gap: bytes, at: int, before: Record | None, record: Record) -> Iterable[Problem]:
    if before is not None and before.flags & 8 and before.size:
        yield from _verify_descriptor(gap, before)
    try:
        raw = gap[record.header - at :]
        start = local_start(record, raw)
    except FormatError as e:
        yield Problem(e.code, record.name, str(e))
        return
    if start != record.start:
        yield Problem(
            "bad-header",
            record.name,
            f"the payload of {record.name} begins at byte {start} by its local header, {record.start} was expected",
        )
        return
    if not record.aligned:
        return
    if struct.unpack_from("<H", raw, 6)[0] != record.flags:
        yield Problem(
            "bad-header", record.name, f"the flags of {record.name} are not those of the central directory"
        )
    if not _is_padding(raw[LOCAL.size + len(record.raw_name) : start - record.header]):
        yield Problem("crc-mismatch", record.name, f"the padding before {record.name} is damaged")


def _is_padding(extra: bytes) -> bool:
    """Whether this is what torch's writer puts before a payload: long sizes where needed, then FB and a run of Z."""
    while len(extra) >= 4:
        kind, length = extra[:2], int.from_bytes(extra[2:4], "little")
        body, extra = extra[4 : 4 + length], extra[4 + length :]
        if len(body) < length or kind not in (b"FB", b"\x01\x00") or (kind == b"FB" and body.strip(b"Z")):
            return False
    return not extra


def _verify_descriptor(gap: bytes, record: Record) -> Iterable[Problem]:
    signature, crc = struct.unpack_from("<4sI", gap) if len(gap) >= 8 else (b"", 0)
    wide = record.size >= LARGE or record.header >= LARGE
    sizes = (
        struct.unpack_from("<QQ" if wide else "<II", gap, 8) if len(gap) >= (24 if wide else 16) else (0, 0)
    )
    if signature != b"PK\x07\x08" or crc != record.crc or sizes != (record.size, record.size):
        # Writers that force 64-bit sizes use the long form for small records too.
        if len(gap) >= 24 and struct.unpack_from("<4sIQQ", gap) == (
            b"PK\x07\x08",
            record.crc,
            record.size,
            record.size,
        ):
            return
        yield Problem(
            "bad-header",
            record.name,
            f"the data descriptor behind {record.name} does not agree with the central directory",
        )

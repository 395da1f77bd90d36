"""torch.save's zip format: one folder of stored records, `data.pkl` and one record per storage.

torch writes a CRC-32 for every record and never checks it. Record layout: pytorch caffe2/serialize/inline_container.cc;
zip structures: PKWARE APPNOTE 6.3 (local header, data descriptor, central directory, zip64).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ckptguard.digest import itemsize
from ckptguard.errors import FormatError
from ckptguard.formats._base import Parsed, Source, Span, name_tensors, read_small_values
from ckptguard.formats._inert import MAX_NAME, brief
from ckptguard.formats.pickles import read_pickle
from ckptguard.formats.reconstruct import Storage, storage_dtype
from ckptguard.model import Problem, Tensor

LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")
LARGE = 0xFFFFFFFF
MAX_PICKLE = 1 << 30
MAX_RECORDS = 5_000_000
ALIGNMENT = 64


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
        count, length, offset = _read_end64(source, tail, at, base)
    if disk not in (0, 0xFFFF):
        raise FormatError("bad-header", "the archive claims to be split over several disks")
    if offset + length > at:
        raise FormatError(
            "out-of-bounds",
            f"the central directory of {length} bytes at {offset} reaches past its end record at {at}",
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
    signature, _, _, _, _, _, _, count, length, offset = END64.unpack(raw)
    if signature != b"PK\x06\x06":
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


# --- the torch file in the archive --------------------------------------------------------------------


def read(source: Source) -> Parsed:
    """Read a torch zip file's structure. Raises FormatError, StoreError."""
    archive = read_archive(source)
    if archive.get("constants.pkl") or any(n.startswith(f"{archive.root}/code/") for n in archive.records):
        return Parsed(
            "torchscript", spans=tuple(r.span for r in settle(source, archive.records.values()).values())
        )
    pickle = archive.get("data.pkl")
    if pickle is None:
        raise FormatError(
            "incomplete-save",
            f"the archive has {len(archive.records)} records and no data.pkl: the save raised an error before it had written anything",
        )
    first = source.read(pickle.header, min(LOCAL.size + len(pickle.raw_name), source.size - pickle.header))
    if local_start(pickle, first) != pickle.start:
        archive = replace(archive, records=settle(source, archive.records.values()))
        pickle = archive.get("data.pkl") or pickle
    if pickle.size > MAX_PICKLE:
        raise FormatError("bad-header", f"data.pkl claims {pickle.size} bytes")
    data = source.read(pickle.start, pickle.size)
    storages: dict[str, Storage] = {}
    pickled = read_pickle(data, persistent=lambda pid: _storage(pid, storages))
    problems = list(_pickle_problems(pickled.end, pickle.size))
    tensors = name_tensors(pickled.value)
    problems += _check_storages(archive, storages)
    problems += _place(archive, storages, tensors)
    problems += _trailing(source, archive)
    read_small_values(source, tensors, overhead=256)
    order = archive.get("byteorder")
    if order and order.size < 16 and source.read(order.start, order.size) == b"big":
        _swap(tensors)
    gaps = tuple(_gaps(archive))
    return Parsed(
        kind="torch-zip",
        tree=pickled.value,
        tensors=tensors,
        globals=pickled.globals,
        problems=tuple(problems),
        spans=tuple(r.span for r in archive.records.values()),
        gaps=gaps,
        verify=lambda found: verify_gaps(archive, found),
        details={"root": archive.root},
    )


def _storage(pid: Any, storages: dict[str, Storage]) -> Storage:
    if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
        raise FormatError("bad-header", f"a persistent id that is no storage: {brief(pid)}")
    _, kind, key, location, numel = pid[:5]
    dtype = storage_dtype(kind)
    if not isinstance(key, str | int) or not isinstance(location, str) or len(str(key)) > MAX_NAME:
        raise FormatError(
            "bad-header", f"a storage with the key {brief(key, 40)} and the location {brief(location, 40)}"
        )
    if dtype is None or not isinstance(numel, int) or numel < 0 or numel > 1 << 50:
        raise FormatError(
            "bad-header",
            f"storage {brief(key, 40)} has the type {brief(kind)} and {brief(numel, 30)} elements",
        )
    storage = Storage(str(key), dtype, numel, str(location), untyped="UntypedStorage" in str(kind))
    known = storages.setdefault(storage.key, storage)
    if known.nbytes != storage.nbytes:
        raise FormatError(
            "bad-header",
            f"storage {storage.key} has {known.nbytes} bytes at one place and {storage.nbytes} at another",
        )
    return storage


def _pickle_problems(end: int, size: int) -> Iterable[Problem]:
    if end != size:
        yield Problem(
            "bad-header",
            "data.pkl",
            f"the pickle ends at byte {end} of {size}: what follows is no part of it",
        )


def _check_storages(archive: Archive, storages: Mapping[str, Storage]) -> Iterable[Problem]:
    for key, storage in storages.items():
        if storage.location == "meta":
            continue
        record = archive.get(f"data/{key}")
        if record is None:
            yield Problem(
                "missing-tensor",
                f"data/{key}",
                f"storage {key} of {storage.nbytes} bytes is not in the archive: the save was interrupted by an error",
            )
        elif record.size != storage.nbytes:
            yield Problem(
                "size-mismatch",
                f"data/{key}",
                f"storage {key} should have {storage.nbytes} bytes, its record has {record.size}",
            )
    prefix = f"{archive.root}/data/"
    for name in archive.records:
        if name.startswith(prefix) and name[len(prefix) :] not in storages:
            yield Problem("unindexed-tensor", name, f"no tensor refers to the record {name}")


def _place(archive: Archive, storages: Mapping[str, Storage], tensors: Iterable[Tensor]) -> Iterable[Problem]:
    """Move each tensor's offset from its storage to the file."""
    for tensor in tensors:
        record = archive.get(f"data/{tensor.storage}") if tensor.storage in storages else None
        if record is None or tensor.start is None:
            tensor.start = None
            continue
        if tensor.start + tensor.nbytes > record.size:
            yield Problem(
                "out-of-bounds",
                tensor.name,
                f"the tensor needs bytes up to {tensor.start + tensor.nbytes} of storage {tensor.storage}, which has {record.size}",
            )
            tensor.start = None
        else:
            tensor.start += record.start
            tensor.storage = f"data/{tensor.storage}"


def _trailing(source: Source, archive: Archive) -> Iterable[Problem]:
    if archive.end < source.size:
        yield Problem(
            "unindexed-tensor",
            "",
            f"{source.size - archive.end} bytes follow the end of the archive at byte {archive.end}",
        )


def _swap(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.value is not None and itemsize(tensor.dtype) > 1:
            tensor.value = tensor.value.byteswap()
        tensor.location = f"{tensor.location} (big-endian)"


# --- the structure between the payloads ---------------------------------------------------------------


def _gaps(archive: Archive) -> Iterable[tuple[int, int]]:
    at = 0
    for record in sorted(archive.records.values(), key=lambda r: r.header):
        if record.start > at:
            yield at, record.start - at
        at = record.start + record.size
    if archive.end > at:
        yield at, archive.end - at


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
    padding = raw[LOCAL.size + len(record.raw_name) :]
    if padding[:2] == b"FB" and padding[4:].strip(b"Z"):
        yield Problem("crc-mismatch", record.name, f"the padding before {record.name} is damaged")


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

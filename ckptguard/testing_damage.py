"""Faults made in real files, as disks, networks, killed jobs and careless scripts make them. For tests, here and of plug-ins.

All work in place on a path and change at least one byte; the file's times stay, as on a disk that rots.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptguard.formats import Source, parse
from ckptguard.formats._zip_archive import LOCAL, read_archive, settle
from ckptguard.storage.local import LocalStore


@contextmanager
def untouched_times(path: Path) -> Iterator[None]:
    """Give the file its times back, where it is still there."""
    before = path.stat()
    yield
    if path.exists():
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# --- bytes --------------------------------------------------------------------------------------------


def flip(path: Path, at: int | None = None, *, record: str | None = None, bit: int = 4) -> int:
    """Flip one bit: at a byte (negative: from the end), or in the middle of a named record; by default in the file's middle.

    Returns the byte's offset.
    """
    size = path.stat().st_size
    if record is not None:
        start, length = extent_of(path, record)
        at = start + length // 2
    at = size // 2 if at is None else at if at >= 0 else size + at
    with untouched_times(path), path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    return at


def truncate(path: Path, keep: float) -> None:
    """Cut the file: a fraction of it stays, or, where `keep` is above 1 or negative, that many bytes of it."""
    size = path.stat().st_size
    end = int(size * keep) if 0 < keep < 1 else int(keep) if keep >= 0 else size + int(keep)
    with untouched_times(path):
        os.truncate(path, end)


def zero_range(path: Path, start: int, length: int) -> None:
    """Overwrite a stretch with zeros: a lost page, a sparse hole."""
    with untouched_times(path), path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(length))


def zero_record(path: Path, record: str) -> None:
    """Overwrite a record's bytes with zeros."""
    zero_range(path, *extent_of(path, record))


def zero_fill(path: Path) -> None:
    """All bytes zero, the size kept: a file whose blocks were allocated and never written."""
    zero_range(path, 0, path.stat().st_size)


def empty(path: Path) -> None:
    with untouched_times(path):
        os.truncate(path, 0)


def append(path: Path, data: bytes = b"\x00left over\x00" * 8) -> None:
    """More bytes at the end: a shorter file written over a longer one."""
    with untouched_times(path), path.open("ab") as file:
        file.write(data)


def splice(path: Path, other: Path, share: float = 0.5) -> None:
    """The beginning of one file and the rest of another: two writers, one name."""
    with untouched_times(path):
        ours, theirs = path.read_bytes(), other.read_bytes()
        at = int(len(ours) * share)
        spliced = ours[:at] + theirs[at:]
        assert spliced != ours, "both files are the same"
        path.write_bytes(spliced)


# --- files --------------------------------------------------------------------------------------------


def drop(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def swap(one: Path, two: Path) -> None:
    """Exchange two files: what a script with a wrong variable copies."""
    aside = one.with_name(one.name + ".swap")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def resave(path: Path, change: Callable[[Any], Any]) -> None:
    """Load a torch file of our own making, change what it holds, and save it again with right checksums."""
    import torch

    with untouched_times(path):
        state = torch.load(path, weights_only=False)
        changed = change(state)
        torch.save(state if changed is None else changed, path)


# --- archives -----------------------------------------------------------------------------------------


def extent_of(path: Path, record: str) -> tuple[int, int]:
    """(start, length) of a torch file's record, or of a tensor of any file, whose name ends so (any name ends with ""). The longest, if several."""
    size = path.stat().st_size
    store = LocalStore(path.parent)
    found: list[tuple[int, int]] = []
    with path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04":
            source = Source(store, path.name, size)
            records = settle(source, read_archive(source).records.values())
            found = [(r.start, r.size) for n, r in records.items() if n.endswith(record)]
    if not found:
        parsed = parse(
            store, path.name, size, "safetensors" if path.name.endswith(".safetensors") else "torch"
        )
        found = [
            (t.start, t.nbytes) for t in parsed.tensors if t.start is not None and t.name.endswith(record)
        ]
    if not found:
        raise KeyError(f"{path.name} has no record or tensor {record!r}")
    return max(found, key=lambda f: f[1])


def header_of(path: Path, record: str) -> int:
    """Where the local header of a torch file's record begins."""
    source = Source(LocalStore(path.parent), path.name, path.stat().st_size)
    return next(r.header for n, r in read_archive(source).records.items() if n.endswith(record))


def rewrite_archive(path: Path, change: Callable[[list[tuple[str, bytes]]], None]) -> None:
    """Write a torch archive again with other records (a list of names and contents), checksums right."""
    with untouched_times(path):
        with zipfile.ZipFile(path) as archive:
            records = [(info.filename, archive.read(info)) for info in archive.infolist()]
        change(records)
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in records:
                archive.writestr(zipfile.ZipInfo(name), data)


def replace_pickle(path: Path, data: bytes) -> None:
    """Put another pickle in the place of a torch file's data.pkl, or write a file that is this pickle alone."""
    if path.exists() and zipfile.is_zipfile(path):
        rewrite_archive(path, lambda records: _put(records, "/data.pkl", data))
    else:
        path.write_bytes(data)


def _put(records: list[tuple[str, bytes]], ending: str, data: bytes) -> None:
    for i, (name, _) in enumerate(records):
        if name.endswith(ending):
            records[i] = (name, data)
            return
    raise KeyError(f"no record {ending}")


def duplicate_record(path: Path, record: str, data: bytes) -> None:
    """A second record of the same name: which one counts depends on the reader."""

    def add(records: list[tuple[str, bytes]]) -> None:
        name = next(n for n, _ in records if n.endswith(record))
        # zipfile would warn of the same name; one letter of another is changed to it below.
        records.append((name[:-1] + "\x7f", data))

    rewrite_archive(path, add)
    with untouched_times(path):
        name = next(n for n in zipfile.ZipFile(path).namelist() if n.endswith(record))
        raw = path.read_bytes().replace((name[:-1] + "\x7f").encode(), name.encode())
        path.write_bytes(raw)


def disagree(path: Path, record: str, *, field: str = "name") -> None:
    """Make a record's local header and the central directory say different things: its name, or its CRC."""
    header = header_of(path, record)
    with untouched_times(path), path.open("r+b") as file:
        file.seek(header)
        raw = bytearray(file.read(LOCAL.size))
        if field == "crc":
            struct.pack_into("<H", raw, 6, struct.unpack_from("<H", raw, 6)[0] & ~8)
            struct.pack_into("<I", raw, 14, 0xDEADBEEF)
            file.seek(header)
            file.write(raw)
        else:
            file.seek(header + LOCAL.size)
            first = file.read(1)[0]
            file.seek(header + LOCAL.size)
            file.write(bytes([first ^ 1]))


# --- files of known kinds -----------------------------------------------------------------------------


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Change what a JSON file says."""
    with untouched_times(path):
        held = json.loads(path.read_text())
        changed = change(held)
        path.write_text(json.dumps(held if changed is None else changed))


def edit_weights(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensors of a safetensors file."""
    from safetensors.torch import load_file, save_file

    with untouched_times(path):
        held = load_file(path)
        changed = change(held)
        held = held if changed is None else changed
        save_file({name: t.contiguous().clone() for name, t in held.items()}, path, {"format": "pt"})

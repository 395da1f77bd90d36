"""torch.save's zip format: one folder of stored records, `data.pkl` and one record per storage.

torch writes a CRC-32 for every record and never checks it. Record layout: pytorch caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptguard.errors import FormatError
from ckptguard.formats._base import Parsed, Source, name_tensors, read_small_values
from ckptguard.formats._inert import MAX_NAME, brief
from ckptguard.formats._zip_archive import (
    LOCAL,
    Archive,
    gaps_of,
    local_start,
    read_archive,
    settle,
    unnamed,
    verify_gaps,
)
from ckptguard.formats.pickles import Opaque, read_pickle
from ckptguard.formats.reconstruct import Storage, storage_dtype
from ckptguard.model import GlobalUse, Problem, Tensor
from ckptguard.values import itemsize

MAX_PICKLE = 1 << 30
PACKED = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp")


def read(source: Source) -> Parsed:
    """Read a torch zip file's structure. Raises FormatError, StoreError."""
    archive = read_archive(source)
    if archive.get("constants.pkl") or any(n.startswith(f"{archive.root}/code/") for n in archive.records):
        return _torchscript(source, archive)
    pickle = archive.get("data.pkl")
    if pickle is None:
        around = [name for name in archive.records if name.lower().endswith(PACKED)]
        if around:
            raise FormatError(
                "bad-header",
                f"a zip archive around {len(around)} checkpoint files ({around[0]}): unpack it, nothing loads it as it is",
            )
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
    problems += unnamed(archive)
    order = archive.get("byteorder")
    swapped = bool(order and order.size < 16 and source.read(order.start, order.size) == b"big")
    read_small_values(source, tensors, overhead=256, sure=swapped)
    if swapped:
        _swap(tensors)
    gaps = tuple(gaps_of(archive))
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


def _torchscript(source: Source, archive: Archive) -> Parsed:
    """A scripted module is no training state, but its pickles are judged: not every loader takes it for one."""
    records = settle(source, archive.records.values())
    uses: dict[GlobalUse, None] = {}
    for record in records.values():
        if record.name.endswith(".pkl") and record.size <= MAX_PICKLE:
            data = source.read(record.start, record.size)
            uses |= dict.fromkeys(read_pickle(data, persistent=lambda pid: Opaque("storage", (pid,))).globals)
    return Parsed("torchscript", globals=tuple(uses), spans=tuple(r.span for r in records.values()))


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

"""torch.save's format before 1.6, and still on request: five pickles, then each storage with its length before it.

No checksum and no index: what proves it is that the walk ends exactly at the end of the file (torch/serialization.py
`_legacy_save`).
"""

from __future__ import annotations

import struct
from typing import Any

from ckptguard.errors import FormatError
from ckptguard.formats._base import Parsed, Source, Span, name_tensors, read_small_values
from ckptguard.formats._inert import MAX_NAME, brief
from ckptguard.formats.pickles import Opaque, Pickled, read_pickle
from ckptguard.formats.reconstruct import Storage, storage_dtype
from ckptguard.model import Problem
from ckptguard.values import itemsize

MAGIC = 0x1950A86A20F9469CFC6C
HEAD = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"
PROTOCOL = 1001
MAX_PICKLES = 1 << 30


def read(source: Source) -> Parsed:
    """Read a legacy torch file's structure. Raises FormatError, StoreError."""
    storages: dict[str, Storage] = {}
    pickles = _read_pickles(source, storages)
    magic, protocol, system, tree, keys = (p.value for p in pickles)
    if magic != MAGIC or protocol != PROTOCOL:
        raise FormatError("bad-header", f"magic number {magic!r} and protocol {protocol!r} are not torch's")
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise FormatError(
            "bad-header", "the file was written on a big-endian machine; its numbers cannot be read here"
        )
    if not isinstance(keys, list):
        raise FormatError("bad-header", "the list of storages is damaged")
    starts, problems, spans = _walk_storages(source, pickles[-1].end, keys, storages)
    tensors = name_tensors(tree)
    for tensor in tensors:
        begin = starts.get(tensor.storage)
        if begin is None or tensor.start is None:
            tensor.start = None
            continue
        if tensor.start + tensor.nbytes > storages[tensor.storage].nbytes:
            problems.append(
                Problem(
                    "out-of-bounds",
                    tensor.name,
                    f"the tensor reaches past the end of storage {tensor.storage}",
                )
            )
            tensor.start = None
        else:
            tensor.start += begin
    read_small_values(source, tensors, overhead=64)
    uses = {use: None for p in pickles for use in p.globals}
    return Parsed("torch-legacy", tree, tensors, tuple(uses), tuple(problems), spans)


def _read_pickles(source: Source, storages: dict[str, Storage]) -> list[Pickled]:
    """The five pickles at the head, from as few bytes as they need."""
    reach = 256 << 10
    while True:
        reach = min(reach, source.size)
        data = source.read(0, reach)
        storages.clear()
        pickles: list[Pickled] = []
        try:
            at = 0
            for _ in range(5):
                pickles.append(read_pickle(data, start=at, persistent=lambda pid: _persistent(pid, storages)))
                at = pickles[-1].end
            return pickles
        except FormatError as error:
            if error.code != "truncated" or reach >= source.size:
                raise
            if reach >= MAX_PICKLES:
                raise FormatError("bad-header", f"no end of the pickles within {reach} bytes") from error
            reach *= 4


def _persistent(pid: Any, storages: dict[str, Storage]) -> Any:
    if not isinstance(pid, tuple) or not pid:
        raise FormatError("bad-header", "a persistent id that is neither storage nor module")
    if pid[0] == "module":
        return pid[1] if len(pid) > 1 else Opaque("module")
    if pid[0] != "storage" or len(pid) < 5:
        raise FormatError("bad-header", f"a persistent id that is no storage: {brief(pid)}")
    kind, key, location, numel = pid[1:5]
    dtype = storage_dtype(kind)
    if not isinstance(key, str | int) or not isinstance(location, str) or len(str(key)) > MAX_NAME:
        raise FormatError(
            "bad-header", f"a storage with the key {brief(key, 40)} and the location {brief(location, 40)}"
        )
    if dtype is None or not isinstance(numel, int) or numel < 0:
        raise FormatError(
            "bad-header",
            f"storage {brief(key, 40)} has the type {brief(kind)} and {brief(numel, 30)} elements",
        )
    storage = Storage(str(key), dtype, numel, str(location))
    storages.setdefault(storage.key, storage)
    if len(pid) > 5 and isinstance(pid[5], tuple) and len(pid[5]) == 3:
        view_key, offset, view_numel = pid[5]
        return Storage(
            storage.key, dtype, int(view_numel), str(location), view_of=str(view_key), view_offset=int(offset)
        )
    return storage


def _walk_storages(
    source: Source, at: int, keys: list[Any], storages: dict[str, Storage]
) -> tuple[dict[str, int], list[Problem], tuple[Span, ...]]:
    starts: dict[str, int] = {}
    problems: list[Problem] = []
    spans: list[Span] = []
    remote = source.store.traits.request_bytes > 0
    for key in keys:
        storage = storages.get(str(key))
        if storage is None:
            raise FormatError(
                "bad-header", f"no tensor refers to storage {brief(key, 40)}, so its size is not known"
            )
        if at + 8 + storage.nbytes > source.size:
            raise FormatError(
                "truncated",
                f"storage {key} of {storage.nbytes} bytes begins at byte {at}, the file ends at {source.size}",
            )
        if not remote:
            numel = struct.unpack("<q", source.read(at, 8))[0]
            if numel != storage.numel:
                raise FormatError(
                    "bad-header", f"storage {key} claims {numel} elements, its tensors say {storage.numel}"
                )
        starts[str(key)] = at + 8
        spans.append(Span(at + 8, storage.nbytes, None, f"storage {key}"))
        at += 8 + storage.numel * itemsize(storage.dtype)
    missing = set(storages) - {str(k) for k in keys}
    if missing:
        problems.append(
            Problem(
                "missing-tensor", "", f"{len(missing)} storages that tensors refer to are not in the file"
            )
        )
    if at != source.size:
        problems.append(
            Problem("unindexed-tensor", "", f"{source.size - at} bytes follow the last storage at byte {at}")
        )
    return starts, problems, tuple(spans)

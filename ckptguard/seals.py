"""Seals: what a checkpoint was when it was written, kept as `RUN/.ckptguard/seals/x.json` for a checkpoint `RUN/x`.

Several ranks write `seals/x/rank-N.json`; the reader merges them. A seal carries its own digest, so that a damaged seal
is told from a damaged checkpoint. Nothing of it lies inside or beside a checkpoint: a file created in a checkpoint's
folder changes the folder's time, by which trainers rotate, and a neighbour is what a sorted glob would load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptguard.digest import BLOCK, block_digests, blocks_digest
from ckptguard.errors import FormatError, KeyNotFound
from ckptguard.model import Entry
from ckptguard.ports import Store, WritableStore

SCHEMA = 1
OURS = ".ckptguard"
FOLDER = f"{OURS}/seals"
SAME_SAVE = 3600.0
"""Seconds within which the ranks of one job write their seals of one save."""
MAX_BYTES = 512 << 20
"""A seal of 30 TB in blocks of 8 MiB has about 150 MB; what is larger is none."""


class _Frozen(BaseModel):
    # Unknown keys are a later version's; what this version does not know it does not judge.
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")


class SealedFile(_Frozen):
    """One file: `digest` is over the list of its block digests. `modified` and `etag` tell whether it was replaced."""

    size: int
    modified: float
    etag: str | None = None
    digest: str
    blocks: tuple[str, ...] = ()

    def fits(self, entry: Entry) -> bool:
        """Whether the file is, by size, time and entity tag, the one that was sealed. Else the seal is stale for it."""
        if self.etag is not None and entry.etag is not None:
            return self.size == entry.size and self.etag == entry.etag
        return self.size == entry.size and self.modified == entry.modified


class SealedTensor(_Frozen):
    """One tensor, under COMPONENT/NAME. `digest` is that of `ckptguard.digest`, over its elements in order."""

    digest: str
    dtype: str
    shape: tuple[int, ...]
    norm: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    nan: int = 0
    inf: int = 0


class Probe(_Frozen):
    """Loss on one fixed batch in evaluation mode, at the moment of the save. `batch` is the batch's fingerprint."""

    loss: float
    batch: str | None = None


class Seal(_Frozen):
    """Everything recorded of one save. `tensors_from` says whether their digests were taken from memory before the
    bytes were written, or from the file after; `rng` maps a rank to its streams' next draws."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    checkpoint: str
    sealed_by: Literal["recorder", "seal"] = "seal"
    created: float = 0.0
    step: int | None = None
    attempt: int | None = None
    block_size: int = BLOCK
    files: Mapping[str, SealedFile] = Field(default_factory=dict)
    tensors: Mapping[str, SealedTensor] = Field(default_factory=dict)
    tensors_from: Literal["memory", "file"] = "file"
    components: Mapping[str, bool | None] = Field(default_factory=dict)
    definitions: Mapping[str, Any] = Field(default_factory=dict)
    topology: Mapping[str, Any] = Field(default_factory=dict)
    timings: Mapping[str, float] = Field(default_factory=dict)
    versions: Mapping[str, str] = Field(default_factory=dict)
    environment: Mapping[str, Any] = Field(default_factory=dict)
    rng: Mapping[str, Mapping[str, tuple[str, ...]]] = Field(default_factory=dict)
    probe: Probe | None = None
    batches: str | None = None
    ranks: tuple[int, ...] = ()

    def to_json(self) -> bytes:
        """The seal as it is stored, its own digest included."""
        body = self.model_dump(mode="json", by_alias=True)
        return json.dumps({**body, "digest": _own_digest(body)}, indent=1, sort_keys=True).encode() + b"\n"

    def stale_for(self, entries: Mapping[str, Entry]) -> bool:
        """Whether no file of the seal is still the one that was sealed: it belongs to an earlier save of that name."""
        return bool(self.files) and not any(
            name in entries and sealed.fits(entries[name]) for name, sealed in self.files.items()
        )


def _own_digest(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def parse_seal(data: bytes, where: str = "seal") -> Seal:
    """The seal in a file's bytes. Raises FormatError for junk, a newer schema, and a seal that is itself damaged."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError("bad-header", f"{where}: no JSON: {error}") from None
    if not isinstance(body, dict):
        raise FormatError("bad-header", f"{where}: expected an object, found {type(body).__name__}")
    if body.get("schema") != SCHEMA:
        raise FormatError(
            "bad-header", f"{where}: schema {body.get('schema')!r}; this version reads {SCHEMA}"
        )
    stated = body.pop("digest", None)
    found = _own_digest(body)
    if stated != found:
        raise FormatError(
            "bad-header", f"{where}: the seal itself is damaged: states digest {stated}, has {found}"
        )
    try:
        return Seal.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise FormatError("bad-header", f"{where}: {place}: {first['msg']}") from None


# --- where seals lie ----------------------------------------------------------------------------------


def seal_key(run: str, checkpoint: str, rank: int | None = None) -> str:
    """The key of a seal. `run` is the run's key in the store ("" for its root), `checkpoint` relative to the run."""
    name = f"{checkpoint}.json" if rank is None else f"{checkpoint}/rank-{rank}.json"
    return f"{run}/{FOLDER}/{name}" if run else f"{FOLDER}/{name}"


def read_seal(store: Store, run: str, checkpoint: str) -> Seal | None:
    """The seal of a checkpoint, merged from its ranks; None when there is none. Raises FormatError, StoreError."""
    found: list[Seal] = []
    whole = _read(store, seal_key(run, checkpoint))
    if whole is not None:
        found.append(whole)
    folder = seal_key(run, checkpoint).removesuffix(".json")
    for entry in sorted(store.list(folder), key=lambda e: (len(e.key), e.key)):
        if entry.key.startswith(f"{folder}/rank-") and entry.key.endswith(".json"):
            part = _read(store, entry.key)
            if part is not None:
                found.append(part)
    return merge(found) if found else None


def _read(store: Store, key: str) -> Seal | None:
    try:
        size = store.stat(key).size
        if size > MAX_BYTES:
            raise FormatError("bad-header", f"{key}: {size} bytes are too many for a seal")
        return parse_seal(store.read(key, 0, size), key)
    except KeyNotFound:
        return None


def write_seal(store: WritableStore, run: str, seal: Seal, rank: int | None = None) -> str:
    """Write a seal atomically in place of an older one; returns its key. Raises StoreError."""
    key = seal_key(run, seal.checkpoint, rank)
    store.put(key, seal.to_json())
    return key


def merge(seals: Iterable[Seal]) -> Seal:
    """One seal of those of several ranks. What is left of an earlier save of that name (another step, long ago) is not
    part of it. A tensor that ranks hold with different content (a shard each) is kept as NAME@rank-N.
    """
    parts = list(seals)
    newest = max(parts, key=lambda seal: seal.created)
    # Not by attempt: ranks count their own, and one that died before its first line is behind.
    parts = [s for s in parts if s.step == newest.step and newest.created - s.created <= SAME_SAVE]
    first = min(parts, key=lambda seal: seal.ranks or (0,))
    if len(parts) == 1:
        return first
    files: dict[str, SealedFile] = {}
    tensors: dict[str, SealedTensor] = {}
    rng: dict[str, Mapping[str, tuple[str, ...]]] = {}
    for seal in sorted(parts, key=lambda seal: seal.ranks or (0,)):
        rank = seal.ranks[0] if seal.ranks else 0
        files.update((name, file) for name, file in seal.files.items() if name not in files)
        for name, tensor in seal.tensors.items():
            same = tensors.setdefault(name, tensor) == tensor
            if not same:
                tensors[f"{name}@rank-{rank}"] = tensor
        rng.update(seal.rng)
    ranks = tuple(sorted({rank for seal in parts for rank in seal.ranks}))
    return first.model_copy(update={"files": files, "tensors": tensors, "rng": rng, "ranks": ranks})


# --- making one ---------------------------------------------------------------------------------------


def seal_file(store: Store, entry: Entry, block_size: int = BLOCK) -> SealedFile:
    """Digests of one file as it lies in the store. Raises StoreError when it changes or goes meanwhile."""
    blocks = block_digests(lambda start, length: store.read(entry.key, start, length), entry.size, block_size)
    return SealedFile(
        size=entry.size, modified=entry.modified, etag=entry.etag, digest=blocks_digest(blocks), blocks=blocks
    )

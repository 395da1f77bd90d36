"""What stores can say beyond listing and reading: checksums they keep, uploads in progress, rules that delete.

Frozen data and the protocols of stores that can prove or receive objects. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckptguard.model import Entry
from ckptguard.ports import Store


class InOrder:
    """Bytes of a key in order, for stores where any range costs the same."""

    def __init__(self, store: Store, key: str, start: int) -> None:
        self._store, self._key, self._at = store, key, start

    def __enter__(self) -> InOrder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, buffer: memoryview) -> None:
        self._store.readinto(self._key, self._at, buffer)
        self._at += len(buffer)


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum that the store keeps of an object. `algorithm` is lower case: crc32, crc32c, crc64nvme, sha256, md5...

    `composite`: made of the checksums of the parts, in their order, instead of the bytes.
    """

    algorithm: str
    value: str
    composite: bool = False


@dataclass(frozen=True, slots=True)
class Proof:
    """What a store vouches for of one object: its size, entity tag, checksums, and the sizes of its parts.

    `part_sizes` is empty for an object that was stored in one piece, or whose parts the store does not report.
    `encrypted`: with a key of the customer's, so that the entity tag is no MD5.
    """

    entry: Entry
    checksums: tuple[Checksum, ...] = ()
    part_sizes: tuple[int, ...] = ()
    encrypted: bool = False


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """A multipart upload that was begun and neither completed nor aborted. Times are epoch seconds."""

    key: str
    upload_id: str
    started: float
    parts: int = 0
    bytes: int = 0
    last_activity: float = 0.0


@dataclass(frozen=True, slots=True)
class DeletedObject:
    """A key of a versioned bucket whose newest version is a delete marker; `version_id` is the newest that has bytes."""

    key: str
    deleted: float
    version_id: str | None


@dataclass(frozen=True, slots=True)
class ExpiryRule:
    """A rule by which the store deletes objects under `prefix` by itself. Days count from when an object was made.

    `tagged`: only objects with certain tags, so that it may not concern a checkpoint at all.
    """

    name: str
    prefix: str
    days: int | None = None
    date: float | None = None
    noncurrent_days: int | None = None
    tagged: bool = False
    min_size: int = 0
    max_size: int | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """How a store keeps and deletes by itself. `unknown` names the questions that it refused to answer."""

    rules: tuple[ExpiryRule, ...] = ()
    versioned: bool = False
    lock_mode: str | None = None
    lock_days: float | None = None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PartReceipt:
    """A part of an upload that the receiving store holds. `md5` and `crc64nvme` are hex and base64, where known."""

    number: int
    size: int
    tag: str
    md5: str | None = None
    crc64nvme: str | None = None


class Upload(Protocol):
    """One object on its way into a store. Nothing is visible under its key before `finish` returns.

    `journaled`: the parts that were received are known to be those of the same source; else they must be compared.
    """

    part_size: int
    journaled: bool

    def received(self) -> Mapping[int, PartReceipt]:
        """The parts that an earlier, broken-off upload of the same object left, by number (from 1)."""

    def send(self, number: int, data: memoryview) -> PartReceipt:
        """Store one part. May be called from several threads. Raises StoreError."""

    def finish(self, parts: Mapping[int, PartReceipt], crc64nvme: str) -> Entry:
        """Make the object visible, whole. Raises Refused if the key changed since, StoreError if the store's checksum differs."""

    def abort(self) -> None:
        """Throw away what was sent."""

    def close(self) -> None:
        """Let go, and keep what was sent for a later process to go on with."""


@runtime_checkable
class Receiving(Protocol):
    """A store that takes whole files of any size, resumably."""

    def receive(self, key: str, size: int, source: str, *, replace: Entry | None = None) -> Upload:
        """Begin, or go on with, the upload of `key`. `source` names the bytes: only parts of the same are gone on with.

        The key must not exist, or still be what `replace` says.
        """


@runtime_checkable
class Proving(Protocol):
    """A store that keeps checksums of its objects."""

    def proof(self, key: str) -> Proof:
        """What the store vouches for. Raises KeyNotFound, StoreError."""


@runtime_checkable
class Keeping(Protocol):
    """A store with uploads in progress, versions and rules of its own."""

    def uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        """Every multipart upload in progress below `prefix`. Raises StoreError."""

    def deleted(self, prefix: str = "") -> Iterator[DeletedObject]:
        """Every key below `prefix` that a delete marker hides. Raises StoreError."""

    def retention(self) -> Retention:
        """The rules of the bucket that concern this store's keys; what may not be asked is named, not raised."""

    def full_key(self, key: str) -> str:
        """The key as the store's own rules know it."""

    def abort_upload(self, upload: OpenUpload) -> None: ...

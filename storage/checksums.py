"""Compares a file with what an object store vouches for, without downloading the object.

The store's own checksums are computed over the file that lies here: of the whole, of the parts it was uploaded in
(composite checksums), or the entity tag, which most stores make of MD5s.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any

import xxhash
from isal import isal_zlib

from ckptguard.ports import Store
from ckptguard.storage._base import Checksum, Proof
from ckptguard.storage._crc64 import awscrt_checksums, join

BUFFER = 4 << 20
SPAN = 64 << 20

# From the quickest to the slowest; an entity tag comes last, because not every store makes it of MD5s.
PREFERRED = (
    "crc64nvme",
    "crc32c",
    "xxhash128",
    "xxhash3",
    "xxhash64",
    "crc32",
    "sha1",
    "sha256",
    "sha512",
    "md5",
)


class Answer(StrEnum):
    """SAME and DIFFERENT are proven; UNKNOWN means that nothing the store keeps can decide."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out, and by what: "CRC64NVME", "SHA256 of 12 parts", or why nothing could decide."""

    answer: Answer
    by: str
    expected: str = ""
    found: str = ""


def compare(store: Store, key: str, proof: Proof, pool: Executor) -> Comparison:
    """Compare `key` of a store that is quick to read with what another store vouches for. Raises StoreError."""
    size = store.stat(key).size
    if size != proof.entry.size:
        return Comparison(Answer.DIFFERENT, "size", str(proof.entry.size), str(size))
    chosen = choose(proof)
    if chosen is None:
        return Comparison(Answer.UNKNOWN, "the store keeps no checksum of it")
    checksum, sizes = chosen
    by = checksum.algorithm.upper() + (f" of {len(sizes)} parts" if sizes else "")
    found = file_checksum(store, key, size, checksum, sizes, pool)
    if found == checksum.value:
        return Comparison(Answer.SAME, by, checksum.value, found)
    if checksum.algorithm == "etag":
        # A store may make its entity tags of something else: a tag that differs proves nothing.
        return Comparison(Answer.UNKNOWN, "its entity tag is no MD5 of these bytes", checksum.value, found)
    again = store.fresh(key) or store
    second = file_checksum(again, key, size, checksum, sizes, pool)
    if second != found:
        return Comparison(Answer.UNKNOWN, f"two readings of the file differ in their {by}", found, second)
    return Comparison(Answer.DIFFERENT, by, checksum.value, found)


def choose(proof: Proof) -> tuple[Checksum, tuple[int, ...]] | None:
    """The best checksum that can be recomputed, with the sizes of the parts for one that is made of parts."""
    usable = [
        c for c in proof.checksums if c.algorithm in PREFERRED and (not c.composite or proof.part_sizes)
    ]
    if usable:
        best = min(usable, key=lambda c: (c.composite, PREFERRED.index(c.algorithm)))
        return best, proof.part_sizes if best.composite else ()
    etag = proof.entry.etag or ""
    digest, dash, _ = etag.partition("-")
    if proof.encrypted or len(digest) != 32 or not all(c in "0123456789abcdef" for c in digest):
        return None
    if not dash:
        return Checksum("etag", digest), ()
    return (Checksum("etag", digest, composite=True), proof.part_sizes) if proof.part_sizes else None


def file_checksum(
    store: Store, key: str, size: int, checksum: Checksum, sizes: Sequence[int], pool: Executor
) -> str:
    """The checksum of a file in the form in which the store states its own."""
    algorithm = "md5" if checksum.algorithm == "etag" else checksum.algorithm
    if sizes:
        starts = [0, *accumulate(sizes)]
        parts = list(
            pool.map(lambda i: _digest(store, key, starts[i], sizes[i], algorithm), range(len(sizes)))
        )
        digest = _hasher(algorithm)
        digest.update(b"".join(parts))
        raw = digest.digest()
    elif algorithm == "crc64nvme":
        raw = crc64_of(store, key, size, pool).to_bytes(8, "big")
    else:
        raw = _digest(store, key, 0, size, algorithm)
    return raw.hex() if checksum.algorithm == "etag" else base64.b64encode(raw).decode()


def crc64_of(store: Store, key: str, size: int, pool: Executor) -> int:
    """The CRC64NVME of a file, its spans computed in parallel."""
    spans = [(at, min(SPAN, size - at)) for at in range(0, size, SPAN)]
    found = pool.map(lambda s: int.from_bytes(_digest(store, key, s[0], s[1], "crc64nvme"), "big"), spans)
    return join((crc, length) for crc, (_, length) in zip(found, spans, strict=True))


def _digest(store: Store, key: str, start: int, length: int, algorithm: str) -> bytes:
    hasher = _hasher(algorithm)
    buffer = memoryview(bytearray(min(BUFFER, length)))
    for at in range(start, start + length, BUFFER):
        piece = buffer[: min(BUFFER, start + length - at)]
        store.readinto(key, at, piece)
        hasher.update(piece)
    digest: bytes = hasher.digest()
    return digest


class _Crc:
    """A cyclic checksum with the face of a hash."""

    def __init__(self, update: Callable[[memoryview | bytes, int], int], width: int) -> None:
        self._update, self._width, self._value = update, width, 0

    def update(self, data: memoryview | bytes) -> None:
        self._value = self._update(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._width, "big")


def _hasher(algorithm: str) -> Any:
    if algorithm == "crc32":
        return _Crc(isal_zlib.crc32, 4)
    if algorithm == "crc32c":
        return _Crc(awscrt_checksums().crc32c, 4)
    if algorithm == "crc64nvme":
        return _Crc(awscrt_checksums().crc64nvme, 8)
    fast = {"xxhash64": xxhash.xxh64, "xxhash3": xxhash.xxh3_64, "xxhash128": xxhash.xxh3_128}
    return fast[algorithm]() if algorithm in fast else hashlib.new(algorithm, usedforsecurity=False)

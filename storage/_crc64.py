"""CRC64NVME, the checksum that S3 keeps of whole objects: of a buffer, and joined from parts."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from ckptguard.errors import MissingExtra


def awscrt_checksums() -> Any:
    """The module that computes the checksums of S3. Raises MissingExtra."""
    try:
        from awscrt import checksums
    except ImportError as error:
        raise MissingExtra("awscrt", "s3", "computing the checksums of an object store") from error
    return checksums


def crc64(data: bytes | bytearray | memoryview) -> str:
    """CRC64NVME as S3 writes it: base64 of eight bytes, most significant first."""
    return encode(awscrt_checksums().crc64nvme(data))


def encode(value: int) -> str:
    return base64.b64encode(value.to_bytes(8, "big")).decode()


def decode(text: str) -> int:
    return int.from_bytes(base64.b64decode(text), "big")


def join(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC64NVME of consecutive runs of bytes, from the CRC and the length of each."""
    checksums, total = awscrt_checksums(), 0
    for crc, length in parts:
        total = checksums.combine_crc64nvme(total, crc, length)
    return total

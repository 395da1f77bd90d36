"""Uploads to S3 that can be gone on with, and that never replace what somebody else wrote meanwhile."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptguard.errors import KeyNotFound, StoreError
from ckptguard.model import Entry
from ckptguard.storage._base import PartReceipt, Upload
from ckptguard.storage._crc64 import crc64
from ckptguard.storage._s3_write import condition, write

if TYPE_CHECKING:
    from ckptguard.storage.s3 import S3Store

MIB = 1 << 20
PART = 16 * MIB
MAX_PARTS = 10_000
RECORDS = ".ckptguard/uploads"
WHOLE = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}


def part_size(size: int) -> int:
    """The same for the same size, so that a later process cuts the file in the same places."""
    return max(PART, math.ceil(size / MAX_PARTS / MIB) * MIB)


def adopt_or_begin(store: S3Store, key: str, size: int, source: str, replace: Entry | None) -> Upload:
    """An upload of `key`, going on with the one that is recorded for the same source."""
    if size <= PART:
        return SinglePut(store, key, replace)
    record = f"{RECORDS}/{key}.json"
    upload = _adopt(store, key, size, source, record, replace)
    if upload is None:
        begun = write(store, "create_multipart_upload", key, checksums=WHOLE, condition={})
        upload = MultipartUpload(store, key, begun["UploadId"], part_size(size), record, replace)
        store.put(record, json.dumps({"upload": begun["UploadId"], "source": source, "size": size}).encode())
    return upload


def _adopt(
    store: S3Store, key: str, size: int, source: str, record: str, replace: Entry | None
) -> MultipartUpload | None:
    try:
        noted = json.loads(store.read(record))
        if (noted["source"], noted["size"]) != (source, size):
            return None
        upload = MultipartUpload(store, key, noted["upload"], part_size(size), record, replace)
        upload.load()
    except (KeyNotFound, ValueError, KeyError, TypeError):
        return None
    except StoreError as error:
        if "NoSuchUpload" in error.message:
            return None
        raise
    return upload


class SinglePut:
    """A small object: sent in one request at the end, so that it appears whole or not at all."""

    part_size = PART
    journaled = False

    def __init__(self, store: S3Store, key: str, replace: Entry | None) -> None:
        self._store, self._key, self._replace = store, key, replace
        self._data = b""

    def received(self) -> Mapping[int, PartReceipt]:
        return {}

    def send(self, number: int, data: memoryview) -> PartReceipt:
        self._data = bytes(data)
        return PartReceipt(number, len(data), "", crc64nvme=crc64(data))

    def finish(self, parts: Mapping[int, PartReceipt], crc64nvme: str) -> Entry:
        write(
            self._store,
            "put_object",
            self._key,
            checksums={"ChecksumCRC64NVME": crc64nvme},
            condition=condition(self._replace),
            Body=self._data,
        )
        return self._store.stat(self._key)

    def abort(self) -> None:
        self._data = b""

    close = abort


class MultipartUpload:
    """A multipart upload whose identity is recorded in the destination, so that any process can go on with it.

    Each part goes with its CRC64, and the whole is completed with the CRC64 of the whole, which the server checks: parts
    that another process put in between make the completion fail instead of making a mixed object.
    """

    journaled = False

    def __init__(
        self, store: S3Store, key: str, upload_id: str, part: int, record: str, replace: Entry | None
    ) -> None:
        self.part_size = part
        self._store, self._key, self._id = store, key, upload_id
        self._record, self._replace = record, replace
        self._received: dict[int, PartReceipt] = {}

    def load(self) -> None:
        """Find out which parts are there. Raises StoreError when there is no such upload any more."""
        where, full = self._store.location.url(self._key), self._store.location.key(self._key)
        for page in self._store.pages("list_parts", where, Key=full, UploadId=self._id):
            for part in page.get("Parts", ()):
                number, tag = part["PartNumber"], part["ETag"].strip('"')
                self._received[number] = PartReceipt(
                    number, part["Size"], tag, tag, part.get("ChecksumCRC64NVME")
                )

    def received(self) -> Mapping[int, PartReceipt]:
        return dict(self._received)

    def send(self, number: int, data: memoryview) -> PartReceipt:
        checksum = crc64(data)
        # The client wants something it can read again when it repeats the request.
        answer = write(
            self._store,
            "upload_part",
            self._key,
            checksums={"ChecksumCRC64NVME": checksum},
            condition={},
            UploadId=self._id,
            PartNumber=number,
            Body=bytes(data),
        )
        tag = answer["ETag"].strip('"')
        return PartReceipt(number, len(data), tag, tag, checksum)

    def finish(self, parts: Mapping[int, PartReceipt], crc64nvme: str) -> Entry:
        plain: list[dict[str, Any]] = [
            {"PartNumber": n, "ETag": f'"{p.tag}"'} for n, p in sorted(parts.items())
        ]
        summed = [
            {**part, **({"ChecksumCRC64NVME": p.crc64nvme} if p.crc64nvme else {})}
            for part, (_, p) in zip(plain, sorted(parts.items()), strict=True)
        ]
        write(
            self._store,
            "complete_multipart_upload",
            self._key,
            # The list of parts is among them: for a server that knows no checksums it must be without.
            checksums={
                "MultipartUpload": {"Parts": summed},
                "ChecksumCRC64NVME": crc64nvme,
                "ChecksumType": "FULL_OBJECT",
            },
            condition=condition(self._replace),
            UploadId=self._id,
            MultipartUpload={"Parts": plain},
        )
        self._forget_record()
        return self._store.stat(self._key)

    def abort(self) -> None:
        self._store.call("abort_multipart_upload", self._key, UploadId=self._id)
        self._forget_record()

    def close(self) -> None:
        """Nothing to do: the server keeps the parts."""

    def _forget_record(self) -> None:
        # A record of an upload that is gone does no harm: it is not adopted.
        with contextlib.suppress(StoreError):
            self._store.delete(self._record)

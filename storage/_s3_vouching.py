"""What a bucket vouches for and what it does by itself: checksums, parts, open uploads, versions, rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptguard.errors import StoreError
from ckptguard.storage._base import Checksum, DeletedObject, OpenUpload, Proof, Retention
from ckptguard.storage._s3_connection import S3Connection, epoch
from ckptguard.storage._s3_rules import read_retention

ALGORITHMS = (
    "CRC64NVME",
    "CRC32C",
    "CRC32",
    "SHA256",
    "SHA1",
    "SHA512",
    "MD5",
    "XXHASH64",
    "XXHASH3",
    "XXHASH128",
)


class Vouching(S3Connection):
    """The abilities `Proving` and `Keeping` of an S3 store."""

    def proof(self, key: str) -> Proof:
        head = self.head(key, ChecksumMode="ENABLED")
        entry = self.entry(key, head)
        checksums = tuple(_checksums(head))
        sizes: tuple[int, ...] = ()
        if "-" in (entry.etag or "") or any(c.composite for c in checksums):
            sizes = self._part_sizes(key, entry.size)
        encrypted = "SSECustomerAlgorithm" in head or str(head.get("ServerSideEncryption", "")).startswith(
            "aws:kms"
        )
        return Proof(entry, checksums, sizes, encrypted)

    def _part_sizes(self, key: str, size: int) -> tuple[int, ...]:
        """Sizes of the parts that an object was uploaded in, or () where the store does not tell."""
        sizes: list[int] = []
        marker = 0
        try:
            while True:
                answer = self.call(
                    "get_object_attributes",
                    key,
                    ObjectAttributes=["ObjectParts"],
                    PartNumberMarker=marker,
                    MaxParts=1000,
                )
                parts = answer.get("ObjectParts", {})
                sizes += [part["Size"] for part in parts.get("Parts", ())]
                if not parts.get("IsTruncated"):
                    break
                marker = parts["NextPartNumberMarker"]
        except StoreError:
            sizes = []
        return tuple(sizes) if sum(sizes) == size else self._even_parts(key, size)

    def _even_parts(self, key: str, size: int) -> tuple[int, ...]:
        """From the first part's size and the number of parts, where all but the last are equal, as clients make them."""
        try:
            head = self.head(key, PartNumber=1)
        except StoreError:
            return ()
        first, count = head["ContentLength"], head.get("PartsCount", 0)
        last = size - first * (count - 1)
        return (first,) * (count - 1) + (last,) if count and 0 < last <= first else ()

    def uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        start = self.prefix_of(prefix)
        for page in self.pages("list_multipart_uploads", self.location.url(prefix), Prefix=start):
            for item in page.get("Uploads", ()):
                if item["Key"].startswith(start):
                    yield self._open_upload(
                        self.relative(item["Key"]), item["UploadId"], epoch(item["Initiated"])
                    )

    def _open_upload(self, key: str, upload_id: str, started: float) -> OpenUpload:
        count, size, latest = 0, 0, started
        try:
            pages = self.pages(
                "list_parts", self.location.url(key), Key=self.location.key(key), UploadId=upload_id
            )
            for part in (p for page in pages for p in page.get("Parts", ())):
                count, size = count + 1, size + part["Size"]
                latest = max(latest, epoch(part["LastModified"]))
        except StoreError:
            # It was completed meanwhile, or its parts may not be listed: that it is open is known all the same.
            pass
        return OpenUpload(key, upload_id, started, count, size, latest)

    def abort_upload(self, upload: OpenUpload) -> None:
        self.call("abort_multipart_upload", upload.key, UploadId=upload.upload_id)

    def deleted(self, prefix: str = "") -> Iterator[DeletedObject]:
        newest: dict[str, tuple[float, str]] = {}
        marked: dict[str, float] = {}
        pages = self.pages("list_object_versions", self.location.url(prefix), Prefix=self.prefix_of(prefix))
        for page in pages:
            for item in page.get("DeleteMarkers", ()):
                if item.get("IsLatest"):
                    marked[item["Key"]] = epoch(item["LastModified"])
            for item in page.get("Versions", ()):
                made = epoch(item["LastModified"])
                if made >= newest.get(item["Key"], (-1.0, ""))[0]:
                    newest[item["Key"]] = (made, item["VersionId"])
        for key, when in sorted(marked.items()):
            yield DeletedObject(self.relative(key), when, newest[key][1] if key in newest else None)

    def full_key(self, key: str) -> str:
        return self.location.key(key)

    def retention(self) -> Retention:
        return read_retention(lambda operation: self.call(operation, None), self.location.prefix)


def _checksums(head: dict[str, Any]) -> Iterator[Checksum]:
    for name in ALGORITHMS:
        value = head.get(f"Checksum{name}")
        if value:
            digest, dash, _ = value.partition("-")
            yield Checksum(name.lower(), digest, bool(dash) or head.get("ChecksumType") == "COMPOSITE")

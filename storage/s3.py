"""Checkpoints in an S3 bucket, or in anything that speaks S3."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from ckptguard.errors import KeyNotFound, ShortRead, StoreError, TargetNotFound
from ckptguard.model import Entry
from ckptguard.ports import Traits
from ckptguard.storage._base import Checksum, DeletedObject, ExpiryRule, OpenUpload, Proof, Retention, Upload
from ckptguard.storage._crc64 import crc64
from ckptguard.storage._s3_client import S3Location, S3Options, make_client, parse_url
from ckptguard.storage._s3_errors import ObjectChanged, error_code, translate, translated
from ckptguard.storage._s3_rules import read_retention
from ckptguard.storage._s3_upload import MultipartUpload, adopt_or_begin

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
MAX_PAUSE = 8.0
# What a broken connection costs: the client gives nothing of a piece that did not come whole.
PIECE = 512 << 10


class S3Store:
    """Keys below `s3://[PROFILE@]BUCKET[/PREFIX]`. All methods may be called from several threads.

    A key is read as the object that `list` or `stat` last saw: when it is replaced meanwhile, reads raise ObjectChanged
    instead of giving bytes of two objects.
    """

    # Another request costs as much as about this many bytes at 100 MB/s and 1 ms.
    traits = Traits(
        local=False, request_bytes=64 << 10, atomic_rename=False, links=False, versions=True, checksums=True
    )

    def __init__(self, root: str, options: S3Options | None = None, *, client: Any = None) -> None:
        self.url = root
        self.location: S3Location = parse_url(root)
        self.options = options or S3Options()
        self.requests = 0
        with translated("", root):
            self.client = client or make_client(self.location, self.options)
        self._slots = threading.BoundedSemaphore(self.options.concurrency)
        self._seen: dict[str, str] = {}

    # --- listing ------------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[Entry]:
        below = self.location.key(prefix)
        start = f"{below}/" if below else ""
        cut = len(self.location.prefix) + 1 if self.location.prefix else 0
        for page in self._pages("list_objects_v2", self.location.url(prefix), Prefix=start):
            for item in page.get("Contents", ()):
                # Consoles and mounts put empty objects that end in a slash where a folder should appear.
                if item["Key"].endswith("/"):
                    continue
                key = item["Key"][cut:]
                etag = _bare(item.get("ETag"))
                self._remember(key, etag)
                yield Entry(key, item["Size"], _epoch(item["LastModified"]), etag=etag)

    def _pages(self, operation: str, where: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """The pages of a listing, each asked for only when the one before was consumed."""
        paginator = self.client.get_paginator(operation)
        config = {"PageSize": self.options.page}
        pages = iter(paginator.paginate(Bucket=self.location.bucket, PaginationConfig=config, **parameters))
        while True:
            with self._slots, translated(self.client.meta.method_to_api_mapping[operation], where):
                page = next(pages, None)
            if page is None:
                return
            self.requests += 1
            yield page

    def stat(self, key: str) -> Entry:
        return self._entry(key, self._head(key))

    def _head(self, key: str, **more: Any) -> dict[str, Any]:
        return self._call("head_object", key, **more)

    def _entry(self, key: str, head: dict[str, Any]) -> Entry:
        etag = _bare(head.get("ETag"))
        self._remember(key, etag)
        return Entry(key, head["ContentLength"], _epoch(head["LastModified"]), etag=etag)

    def _remember(self, key: str, etag: str | None) -> None:
        if etag:
            self._seen[key] = etag

    def _call(self, operation: str, key: str | None, **parameters: Any) -> dict[str, Any]:
        """One request about one key, or about the bucket."""
        name = self.client.meta.method_to_api_mapping[operation]
        if key is not None:
            parameters["Key"] = self.location.key(key)
        with self._slots, translated(name, self.location.url(key or "")):
            self.requests += 1
            answer: dict[str, Any] = getattr(self.client, operation)(
                Bucket=self.location.bucket, **parameters
            )
            return answer

    # --- reading ------------------------------------------------------------------------------------

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        view, done = buffer.cast("B"), 0

        def rest() -> None:
            nonlocal done
            try:
                done = self._range(key, start, view, done)
            except _Broken as broken:
                done = max(done, broken.done)
                raise
            if done < len(view):
                raise _Broken(f"the connection ended {len(view) - done} bytes early")

        self._patiently(rest, key, lambda: done)

    def _range(self, key: str, start: int, view: memoryview, done: int) -> int:
        """Ask for what is missing of a range and return how much is there when the answer ends, however it ends."""
        first, last = start + done, start + len(view) - 1
        condition = {"IfMatch": self._seen[key]} if key in self._seen else {}
        with self._slots:
            self.requests += 1
            answer = self.client.get_object(
                Bucket=self.location.bucket,
                Key=self.location.key(key),
                Range=f"bytes={first}-{last}",
                **condition,
            )
            body = answer["Body"]
            try:
                _check_range(answer, first, last, self.location.url(key))
                while done < len(view):
                    try:
                        got = body.readinto(view[done : done + PIECE])
                    except Exception as error:
                        raise _Broken(str(error), done) from error
                    if not got:
                        break
                    done += got
            finally:
                # A connection whose answer was not read to its end cannot be used again.
                body.close()
        return done

    def _patiently(self, attempt: Callable[[], None], key: str, progress: Callable[[], int]) -> None:
        """Repeat a read that broke off, with growing random pauses. The client itself repeats refused requests."""
        where = self.location.url(key)
        failures, reached = 0, 0
        while True:
            try:
                return attempt()
            except (StoreError, _Broken) as error:
                if isinstance(error, StoreError):
                    raise
                failures += 1
                # A connection that brings something worth while before it breaks does not use patience up.
                if max(progress(), error.done) - reached >= PIECE:
                    failures, reached = 1, max(progress(), error.done)
                if failures >= self.options.attempts:
                    raise StoreError(
                        f"{where}: reading failed {failures} times at byte {reached}: {error}",
                        "repeat; look at the network and the server's log",
                    ) from error
            except Exception as error:
                raise self._refused(error, key) from error
            time.sleep(random.uniform(0, min(MAX_PAUSE, 0.1 * 2**failures)))

    def _refused(self, error: Exception, key: str) -> Exception:
        """What a refused GetObject means: beyond the end is a short file, not a broken store."""
        if error_code(error) in ("InvalidRange", "416"):
            return ShortRead(f"{self.location.url(key)}: shorter than was listed")
        return translate(error, "GetObject", self.location.url(key))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if length is None:
            length = max(0, self.stat(key).size - start)
        buffer = bytearray(length)
        self.readinto(key, start, memoryview(buffer))
        return bytes(buffer)

    def fresh(self, key: str) -> S3Store:
        # Nothing is cached here: a second request is a second read.
        return self

    # --- what the store vouches for -----------------------------------------------------------------

    def proof(self, key: str) -> Proof:
        head = self._head(key, ChecksumMode="ENABLED")
        entry = self._entry(key, head)
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
                answer = self._call(
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
            head = self._head(key, PartNumber=1)
        except StoreError:
            return ()
        first, count = head["ContentLength"], head.get("PartsCount", 0)
        last = size - first * (count - 1)
        return (first,) * (count - 1) + (last,) if count and 0 < last <= first else ()

    def uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        below = self.location.key(prefix)
        start = f"{below}/" if below else ""
        cut = len(self.location.prefix) + 1 if self.location.prefix else 0
        for page in self._pages("list_multipart_uploads", self.location.url(prefix), Prefix=start):
            for item in page.get("Uploads", ()):
                if item["Key"].startswith(start):
                    yield self._open_upload(item["Key"][cut:], item["UploadId"], _epoch(item["Initiated"]))

    def _open_upload(self, key: str, upload_id: str, started: float) -> OpenUpload:
        count, size, latest = 0, 0, started
        try:
            pages = self._pages(
                "list_parts", self.location.url(key), Key=self.location.key(key), UploadId=upload_id
            )
            for part in (p for page in pages for p in page.get("Parts", ())):
                count, size = count + 1, size + part["Size"]
                latest = max(latest, _epoch(part["LastModified"]))
        except StoreError:
            # It was completed meanwhile, or its parts may not be listed: that it is open is known all the same.
            pass
        return OpenUpload(key, upload_id, started, count, size, latest)

    def abort_upload(self, upload: OpenUpload) -> None:
        self._call("abort_multipart_upload", upload.key, UploadId=upload.upload_id)

    def deleted(self, prefix: str = "") -> Iterator[DeletedObject]:
        below = self.location.key(prefix)
        cut = len(self.location.prefix) + 1 if self.location.prefix else 0
        newest: dict[str, tuple[float, str]] = {}
        marked: dict[str, float] = {}
        pages = self._pages(
            "list_object_versions", self.location.url(prefix), Prefix=f"{below}/" if below else ""
        )
        for page in pages:
            for item in page.get("DeleteMarkers", ()):
                if item.get("IsLatest"):
                    marked[item["Key"]] = _epoch(item["LastModified"])
            for item in page.get("Versions", ()):
                made = _epoch(item["LastModified"])
                if made >= newest.get(item["Key"], (-1.0, ""))[0]:
                    newest[item["Key"]] = (made, item["VersionId"])
        for key, when in sorted(marked.items()):
            yield DeletedObject(key[cut:], when, newest[key][1] if key in newest else None)

    def full_key(self, key: str) -> str:
        return self.location.key(key)

    def retention(self) -> Retention:
        return read_retention(lambda operation: self._call(operation, None), self.location.prefix)

    # --- writing, for the commands that were asked to -----------------------------------------------

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> Entry:
        condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_match} if if_match else {}
        self._call("put_object", key, Body=data, ChecksumCRC64NVME=crc64(data), **condition)
        return self.stat(key)

    def delete(self, key: str) -> None:
        self._call("delete_object", key)
        self._seen.pop(key, None)

    def receive(self, key: str, size: int, source: str, *, replace: Entry | None = None) -> Upload:
        return adopt_or_begin(self, key, size, source, replace)

    def forget(self) -> None:
        """Forget which objects were seen, so that the next read takes those that are there now."""
        self._seen.clear()


class _Broken(Exception):
    """An answer that broke off; `done` is how far it came."""

    def __init__(self, message: str, done: int = 0) -> None:
        super().__init__(message)
        self.done = done


def locate(target: str) -> tuple[str, str]:
    """(root, key) of an S3 target: its folder and its name when it is one object, else itself and "".

    Raises TargetNotFound when nothing lies there.
    """
    location = parse_url(target)
    store = S3Store(target)
    try:
        first = next(store.list(), None)
    except KeyNotFound as error:
        raise TargetNotFound(error.message, error.hint) from error
    if first is not None:
        return target, ""
    if location.prefix:
        root, _, name = target.rstrip("/").rpartition("/")
        try:
            S3Store(root, client=store.client).stat(name)
            return root, name
        except KeyNotFound:
            pass
    raise TargetNotFound(f"{target}: nothing is stored there", "check the bucket and the prefix")


def _check_range(answer: dict[str, Any], first: int, last: int, where: str) -> None:
    """A server, or a proxy before it, may answer another range than was asked for."""
    given = answer.get("ContentRange", "")
    span, _, total = given.removeprefix("bytes ").partition("/")
    low, _, high = span.partition("-")
    if not (low.isdigit() and high.isdigit()):
        if first == 0 and answer.get("ContentLength", 0) == last + 1:
            return
        raise StoreError(
            f"{where}: the server does not answer ranges", "use an endpoint that supports the Range header"
        )
    if total.isdigit() and int(total) <= last:
        raise ShortRead(f"{where}: ends at byte {total}, {last + 1 - int(total)} more were expected")
    if int(low) != first or int(high) != last:
        raise _Broken(f"asked for bytes {first}-{last}, the server answered {span}")


def _checksums(head: dict[str, Any]) -> Iterator[Checksum]:
    for name in ALGORITHMS:
        value = head.get(f"Checksum{name}")
        if value:
            digest, dash, _ = value.partition("-")
            yield Checksum(name.lower(), digest, bool(dash) or head.get("ChecksumType") == "COMPOSITE")


def _epoch(when: datetime) -> float:
    return when.timestamp()


def _bare(etag: str | None) -> str | None:
    return etag.strip('"') if etag else None


__all__ = ["ExpiryRule", "MultipartUpload", "ObjectChanged", "S3Options", "S3Store", "locate"]

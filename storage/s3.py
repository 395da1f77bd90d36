"""Checkpoints in an S3 bucket, or in anything that speaks S3."""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.errors import KeyNotFound, TargetNotFound
from ckptguard.model import Entry
from ckptguard.ports import Traits
from ckptguard.storage._base import Upload
from ckptguard.storage._crc64 import crc64
from ckptguard.storage._s3_client import S3Options, parse_url
from ckptguard.storage._s3_connection import bare, epoch
from ckptguard.storage._s3_errors import ObjectChanged
from ckptguard.storage._s3_reading import RangeReader
from ckptguard.storage._s3_upload import adopt_or_begin
from ckptguard.storage._s3_vouching import Vouching
from ckptguard.storage._s3_write import write


class S3Store(Vouching):
    """Keys below `s3://[PROFILE@]BUCKET[/PREFIX]`. All methods may be called from several threads.

    A key is read as the object that `list` or `stat` last saw: when it is replaced meanwhile, reads raise ObjectChanged
    instead of giving bytes of two objects.
    """

    # Another request costs as much as about this many bytes at 100 MB/s and 1 ms.
    traits = Traits(
        local=False, request_bytes=64 << 10, atomic_rename=False, links=False, versions=True, checksums=True
    )

    # --- listing ------------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[Entry]:
        for page in self.pages("list_objects_v2", self.location.url(prefix), Prefix=self.prefix_of(prefix)):
            for item in page.get("Contents", ()):
                # Consoles and mounts put empty objects that end in a slash where a folder should appear.
                if item["Key"].endswith("/"):
                    continue
                key = self.relative(item["Key"])
                etag = bare(item.get("ETag"))
                self._remember(key, etag)
                yield Entry(key, item["Size"], epoch(item["LastModified"]), etag=etag)

    def stat(self, key: str) -> Entry:
        return self.entry(key, self.head(key))

    # --- reading ------------------------------------------------------------------------------------

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        with self.stream(key, start, start + buffer.nbytes) as fill:
            fill(buffer)

    def stream(self, key: str, start: int, end: int) -> RangeReader:
        return RangeReader(self, key, start, end)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if length is None:
            length = max(0, self.stat(key).size - start)
        buffer = bytearray(length)
        self.readinto(key, start, memoryview(buffer))
        return bytes(buffer)

    def fresh(self, key: str) -> S3Store:
        # Nothing is cached here: a second request is a second read.
        return self

    # --- writing, for the commands that were asked to -----------------------------------------------

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> Entry:
        condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_match} if if_match else {}
        write(
            self,
            "put_object",
            key,
            checksums={"ChecksumCRC64NVME": crc64(data)},
            condition=condition,
            Body=data,
        )
        return self.stat(key)

    def delete(self, key: str) -> None:
        self.call("delete_object", key)
        self._seen.pop(key, None)

    def receive(self, key: str, size: int, source: str, *, replace: Entry | None = None) -> Upload:
        return adopt_or_begin(self, key, size, source, replace)

    def forget(self) -> None:
        """Forget which objects were seen, so that the next read takes those that are there now."""
        self._seen.clear()


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


__all__ = ["ObjectChanged", "S3Options", "S3Store", "locate"]

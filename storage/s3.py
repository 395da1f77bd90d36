"""Checkpoints in an S3 bucket, or in anything that speaks S3."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from ckptguard.errors import KeyNotFound, ShortRead, StoreError, TargetNotFound
from ckptguard.model import Entry
from ckptguard.ports import Traits
from ckptguard.storage._base import Upload
from ckptguard.storage._crc64 import crc64
from ckptguard.storage._s3_client import S3Options, parse_url
from ckptguard.storage._s3_connection import bare, epoch
from ckptguard.storage._s3_errors import ObjectChanged, error_code, translate
from ckptguard.storage._s3_upload import adopt_or_begin
from ckptguard.storage._s3_vouching import Vouching
from ckptguard.storage._s3_write import write

MAX_PAUSE = 8.0
# What a broken connection costs: the client gives nothing of a piece that did not come whole.
PIECE = 512 << 10


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


__all__ = ["ObjectChanged", "S3Options", "S3Store", "locate"]

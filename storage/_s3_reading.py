"""Reads a range of an object as it comes in, and goes on where a connection broke."""

from __future__ import annotations

import random
import time
from types import TracebackType
from typing import Any

from ckptguard.errors import ShortRead, StoreError
from ckptguard.storage._s3_connection import S3Connection
from ckptguard.storage._s3_errors import error_code, translate

MAX_PAUSE = 8.0
# What a broken connection costs: the client gives nothing of a piece that did not come whole.
PIECE = 512 << 10


class Broken(Exception):
    """An answer that broke off, or is another than was asked for."""


class RangeReader:
    """The bytes [start, end) of an object, in one request if nothing breaks. Each call fills a buffer with the next ones.

    Holds one of the connection's slots from the first byte on; use as a context manager. For one thread.
    """

    def __init__(self, connection: S3Connection, key: str, start: int, end: int) -> None:
        self._connection, self._key = connection, key
        self._at, self._end = start, end
        self._where = connection.location.url(key)
        self._body: Any = None
        self._failures, self._reached = 0, start

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __call__(self, buffer: memoryview) -> None:
        """Raises ShortRead, KeyNotFound, ObjectChanged, StoreError. The client itself repeats refused requests."""
        view, done = buffer.cast("B"), 0
        while done < len(view):
            try:
                done += self._some(view[done : done + PIECE])
            except Broken as broken:
                self._close()
                self._be_patient(broken)
        if self._at == self._end:
            self._close()

    def _some(self, view: memoryview) -> int:
        if self._body is None:
            self._open()
        try:
            got: int = self._body.readinto(view)
        except Exception as error:
            raise Broken(str(error)) from error
        if not got:
            raise Broken(f"the connection ended {self._end - self._at} bytes early")
        self._at += got
        return got

    def _open(self) -> None:
        """Ask for what is missing of the range."""
        connection = self._connection
        seen = connection.seen(self._key)
        connection.slots.acquire()
        try:
            connection.requests += 1
            answer = connection.client.get_object(
                Bucket=connection.location.bucket,
                Key=connection.location.key(self._key),
                Range=f"bytes={self._at}-{self._end - 1}",
                **({"IfMatch": seen} if seen else {}),
            )
        except Exception as error:
            connection.slots.release()
            # Beyond the end is a short file, not a broken store.
            if error_code(error) in ("InvalidRange", "416"):
                raise ShortRead(f"{self._where}: shorter than was listed") from error
            raise translate(error, "GetObject", self._where) from error
        self._body = answer["Body"]
        self._check(answer)

    def _check(self, answer: dict[str, Any]) -> None:
        """A server, or a proxy before it, may answer another range than was asked for."""
        first, last = self._at, self._end - 1
        given = answer.get("ContentRange", "")
        span, _, total = given.removeprefix("bytes ").partition("/")
        low, _, high = span.partition("-")
        if not (low.isdigit() and high.isdigit()):
            if first == 0 and answer.get("ContentLength", 0) == last + 1:
                return
            raise StoreError(
                f"{self._where}: the server does not answer ranges",
                "use an endpoint that supports the Range header",
            )
        if total.isdigit() and int(total) <= last:
            raise ShortRead(
                f"{self._where}: ends at byte {total}, {last + 1 - int(total)} more were expected"
            )
        if int(low) != first or int(high) != last:
            raise Broken(f"asked for bytes {first}-{last}, the server answered {span}")

    def _close(self) -> None:
        if self._body is not None:
            # A connection whose answer was not read to its end cannot be used again.
            self._body.close()
            self._body = None
            self._connection.slots.release()

    def _be_patient(self, broken: Broken) -> None:
        """Pause, longer each time and at random, or raise. A connection that brings something worth while before it
        breaks does not use patience up."""
        self._failures += 1
        if self._at - self._reached >= PIECE:
            self._failures, self._reached = 1, self._at
        if self._failures >= self._connection.options.attempts:
            raise StoreError(
                f"{self._where}: reading failed {self._failures} times at byte {self._at}: {broken}",
                "repeat; look at the network and the server's log",
            ) from broken
        time.sleep(random.uniform(0, min(MAX_PAUSE, 0.1 * 2**self._failures)))

"""A bucket and a client for it: single requests and paged ones, bounded in number, their errors translated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from ckptguard.model import Entry
from ckptguard.storage._s3_client import S3Location, S3Options, make_client, parse_url
from ckptguard.storage._s3_errors import translated


class S3Connection:
    """Requests about the keys below `s3://[PROFILE@]BUCKET[/PREFIX]`. May be used from several threads."""

    def __init__(self, root: str, options: S3Options | None = None, *, client: Any = None) -> None:
        self.url = root
        self.location: S3Location = parse_url(root)
        self.options = options or S3Options()
        self.requests = 0
        with translated("", root):
            self.client = client or make_client(self.location, self.options)
        self.slots = threading.BoundedSemaphore(self.options.concurrency)
        self._seen: dict[str, str] = {}
        # What the server was found not to know: see `_s3_write`.
        self.lacks: set[str] = set()

    def pages(self, operation: str, where: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """The pages of a listing, each asked for only when the one before was consumed."""
        paginator = self.client.get_paginator(operation)
        config = {"PageSize": self.options.page}
        pages = iter(paginator.paginate(Bucket=self.location.bucket, PaginationConfig=config, **parameters))
        while True:
            with self.slots, translated(self.client.meta.method_to_api_mapping[operation], where):
                page = next(pages, None)
            if page is None:
                return
            self.requests += 1
            yield page

    def prefix_of(self, folder: str) -> str:
        """What the full keys below a folder begin with."""
        below = self.location.key(folder)
        return f"{below}/" if below else ""

    def relative(self, full: str) -> str:
        """The key, relative to the store's root, of a full key."""
        return full[len(self.location.prefix) + 1 if self.location.prefix else 0 :]

    def head(self, key: str, **more: Any) -> dict[str, Any]:
        """What the server says of an object, without its bytes. Raises KeyNotFound, StoreError."""
        return self.call("head_object", key, **more)

    def entry(self, key: str, head: dict[str, Any]) -> Entry:
        """The entry of an object from the answer about it; from now on reads are of this very object."""
        etag = bare(head.get("ETag"))
        self._remember(key, etag)
        return Entry(key, head["ContentLength"], epoch(head["LastModified"]), etag=etag)

    def _remember(self, key: str, etag: str | None) -> None:
        if etag:
            self._seen[key] = etag

    def seen(self, key: str) -> str | None:
        """The entity tag of the object that a listing or an answer last showed under this key."""
        return self._seen.get(key)

    def call(self, operation: str, key: str | None, **parameters: Any) -> dict[str, Any]:
        """One request about one key, or about the bucket."""
        name = self.client.meta.method_to_api_mapping[operation]
        if key is not None:
            parameters["Key"] = self.location.key(key)
        with self.slots, translated(name, self.location.url(key or "")):
            self.requests += 1
            answer: dict[str, Any] = getattr(self.client, operation)(
                Bucket=self.location.bucket, **parameters
            )
            return answer


def epoch(when: datetime) -> float:
    return when.timestamp()


def bare(etag: str | None) -> str | None:
    """An entity tag without its quotes."""
    return etag.strip('"') if etag else None

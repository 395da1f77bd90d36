"""Writing requests with checksums and conditions, as far as the server knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptguard.errors import KeyNotFound, Refused, StoreError
from ckptguard.model import Entry

if TYPE_CHECKING:
    from ckptguard.storage.s3 import S3Store

UNKNOWN_TO_SERVER = (
    "NotImplemented",
    "InvalidArgument",
    "InvalidRequest",
    "MalformedXML",
    "UnsupportedArgument",
)
CHECKSUMS, CONDITIONS = "checksums", "conditions"


def condition(replace: Entry | None) -> dict[str, str]:
    """The condition under which a write may take place: nothing lies there, or still what `replace` says."""
    return {"IfMatch": replace.etag} if replace and replace.etag else {"IfNoneMatch": "*"}


def write(
    store: S3Store,
    operation: str,
    key: str,
    *,
    checksums: dict[str, Any],
    condition: dict[str, str],
    **rest: Any,
) -> dict[str, Any]:
    """One writing request. What the server does not know is left out from then on: a condition is then looked after by
    asking first, and a checksum by comparing what has arrived. Raises Refused, StoreError.
    """
    while True:
        extra = {} if CHECKSUMS in store.lacks else dict(checksums)
        if CONDITIONS not in store.lacks:
            extra |= condition
        elif condition:
            _ask_first(store, key, condition)
        try:
            return store.call(operation, key, **{**rest, **extra})
        except StoreError as error:
            missing = _missing(store, error.message, bool(checksums), bool(condition))
            if missing is None:
                raise
            store.lacks.add(missing)


def _missing(store: S3Store, message: str, checksums: bool, condition: bool) -> str | None:
    """What the server seems not to know; None for an error of another kind."""
    if not any(code in message for code in UNKNOWN_TO_SERVER):
        return None
    if condition and CONDITIONS not in store.lacks and "if-" in message.lower():
        return CONDITIONS
    if checksums and CHECKSUMS not in store.lacks:
        return CHECKSUMS
    return CONDITIONS if condition and CONDITIONS not in store.lacks else None


def _ask_first(store: S3Store, key: str, condition: dict[str, str]) -> None:
    try:
        there: str | None = store.stat(key).etag
    except KeyNotFound:
        there = None
    if there != condition.get("IfMatch"):
        raise Refused(
            f"{store.location.url(key)}: changed by someone else meanwhile; it was left as it is",
            "look again, then repeat",
        )

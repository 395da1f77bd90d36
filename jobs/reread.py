"""Reads bytes again and compares them with what they were at first sight. Runs in a child process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ckptguard.codes import finding
from ckptguard.digest import block_digests
from ckptguard.errors import KeyNotFound, StoreError
from ckptguard.model import Finding
from ckptguard.ports import Store
from ckptguard.units import size, timestamp

Say = Callable[[str, int], None]


def scrub_file(store: Store, file: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Read one remembered file past the cache, and once more before it is accused.

    `file` has key, name, size, modified, etag, block_size, blocks, first_seen. The result's `outcome` is good, changed
    (it was replaced since: no rot), gone, or bad with a finding. Never raises.
    """
    try:
        entry = store.stat(file["key"])
        if (entry.size, entry.modified, entry.etag) != (file["size"], file["modified"], file["etag"]):
            return {"id": file["id"], "outcome": "changed"}
        first = _digests(store, file, say)
        if first == tuple(file["blocks"]):
            return {"id": file["id"], "outcome": "good"}
        second = _digests(store, file, say)
        after = store.stat(file["key"])
    except KeyNotFound:
        return {"id": file["id"], "outcome": "gone"}
    except StoreError as error:
        return _bad(file, finding("unreadable", file["name"], error.message, error.hint))
    if (after.size, after.modified, after.etag) != (file["size"], file["modified"], file["etag"]):
        return {"id": file["id"], "outcome": "changed"}
    return _bad(file, accuse(file, first, second))


def _digests(store: Store, file: Mapping[str, Any], say: Say) -> tuple[str, ...]:
    fresh = store.fresh(file["key"]) or store

    def read(start: int, length: int) -> bytes:
        data = fresh.read(file["key"], start, length)
        say(file["key"], length)
        return data

    return block_digests(read, file["size"], file["block_size"])


def accuse(file: Mapping[str, Any], first: tuple[str, ...], second: tuple[str, ...]) -> Finding:
    """Two readings that differ accuse the machine; two that agree accuse the bytes."""
    known = tuple(file["blocks"])
    if first != second:
        block = next(n for n, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
        return finding(
            "unstable-read",
            file["name"],
            f"two reads of block {block} ({size(file['block_size'])} each) gave {first[block]} and {second[block]}",
        )
    wrong = [n for n, pair in enumerate(zip(known, second, strict=True)) if pair[0] != pair[1]]
    block = wrong[0]
    start = block * file["block_size"]
    return finding(
        "digest-mismatch",
        file["name"],
        f"{len(wrong)} of {len(known)} blocks changed though size and time did not; block {block} (from byte {start}) "
        f"was {known[block]} on {timestamp(file['first_seen'])} and is {second[block]}",
    )


def _bad(file: Mapping[str, Any], found: Finding) -> dict[str, Any]:
    return {"id": file["id"], "outcome": "bad", "finding": asdict(found)}

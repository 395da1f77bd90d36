"""Megatron-core's `integrity.json`: a SHA-256 of every file of a checkpoint directory (dist_checkpointing, core 0.19 on).

Flat: names of files of the directory itself, none of sub-folders, without `integrity.json`. Files that were added after
it was written (a tokenizer, a run's config) are in no list, which is normal.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ckptguard.errors import FormatError, Refused
from ckptguard.facts import default_jobs
from ckptguard.model import Entry, Manifest
from ckptguard.ports import Store, WritableStore

NAME = "integrity.json"
MARK = "metadata.json"
ALGORITHM = "sha256"
BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A file whose bytes are not those that were recorded."""

    name: str
    expected: str
    found: str


def read_integrity(tree: Any) -> Mapping[str, str]:
    """The digests by file name from the parsed JSON. Raises FormatError where it is of another form."""
    if not isinstance(tree, dict) or not isinstance(tree.get("files"), dict):
        raise FormatError("bad-header", f"{NAME} has no list of files")
    if tree.get("algorithm") != ALGORITHM:
        raise FormatError(
            "bad-header", f"{NAME} uses {str(tree.get('algorithm'))[:40]!r}; only {ALGORITHM} is known"
        )
    files = tree["files"]
    for name, digest in files.items():
        if "/" in name or name in ("", ".", "..") or not isinstance(digest, str) or len(digest) != 64:
            raise FormatError("bad-header", f"{NAME}: the entry {str(name)[:60]!r} is damaged")
    return {str(name): str(digest).lower() for name, digest in files.items()}


def verify_integrity(
    store: Store, folder: str, expected: Mapping[str, str], sizes: Mapping[str, int], jobs: int | None = None
) -> list[Mismatch]:
    """Hash the listed files that are there, several at a time, and name those that differ. Raises StoreError."""
    names = [name for name in expected if name in sizes]
    prefix = f"{folder}/" if folder else ""
    with ThreadPoolExecutor(jobs or default_jobs(), thread_name_prefix="ckptguard-sha256") as pool:
        found = list(pool.map(lambda name: sha256(store, prefix + name, sizes[name]), names))
    return [
        Mismatch(name, expected[name], digest)
        for name, digest in zip(names, found)
        if digest != expected[name]
    ]


def write_integrity(store: WritableStore, manifest: Manifest, jobs: int | None = None) -> Entry:
    """Record the SHA-256 of every file as it is now, in the folder where megatron-core looks for it.

    Raises Refused for what megatron-core's dist_checkpointing did not write, StoreError.
    """
    mark = next((f for f in manifest.files if posixpath.basename(f.name) == MARK), None)
    if mark is None:
        raise Refused(
            f"{manifest.path} has no {MARK}: it is no checkpoint of megatron-core's torch_dist format",
            "leave --megatron away: a seal under .ckptguard/ serves every layout",
        )
    folder = posixpath.dirname(mark.name)
    files = [
        f
        for f in manifest.files
        if posixpath.dirname(f.name) == folder
        and posixpath.basename(f.name) != NAME
        and f.entry.kind != "other"
    ]
    files.sort(key=lambda f: f.name)
    with ThreadPoolExecutor(jobs or default_jobs(), thread_name_prefix="ckptguard-sha256") as pool:
        digests = list(pool.map(lambda f: sha256(store, f.entry.key, f.entry.size), files))
    listed = {posixpath.basename(f.name): digest for f, digest in zip(files, digests)}
    return store.put(
        posixpath.join(posixpath.dirname(mark.entry.key), NAME),
        json.dumps({"algorithm": ALGORITHM, "files": listed}, indent=2).encode(),
    )


def sha256(store: Store, key: str, size: int) -> str:
    """The SHA-256 of a file, read once in blocks."""
    hasher = hashlib.sha256()
    buffer = memoryview(bytearray(min(BLOCK, max(1, size))))
    for at in range(0, size, BLOCK):
        view = buffer[: min(BLOCK, size - at)]
        store.readinto(key, at, view)
        hasher.update(view)
    return hasher.hexdigest()

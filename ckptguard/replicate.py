"""Copies a checkpoint to another store and proves that it arrived; a pointer is moved last, and never backwards.

On an object store each file becomes visible when it is whole, those that mark the checkpoint as complete last. On a disk
the whole checkpoint is written below `.ckptguard/incoming/` and moved into place by one rename. The receipt in
`.ckptguard/replicas/` of the destination is written when every file is proven, and not before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptguard import units
from ckptguard.arriving import FILES_AT_ONCE, Arrived, Progress, bring
from ckptguard.errors import FormatError, KeyNotFound, Refused, StoreError
from ckptguard.layouts._base import build_directory, locate, step_in
from ckptguard.model import Entry, Manifest, ManifestFile, Pointer, Role
from ckptguard.onto_disk import onto_disk
from ckptguard.ports import Store, WritableStore
from ckptguard.seals import Seal, read_seal, write_seal
from ckptguard.storage.transfer import Copier

OURS = ".ckptguard"
RECEIPTS = f"{OURS}/replicas"
LAST = frozenset({Role.INDEX, Role.METADATA, Role.TRAINER_STATE, Role.CONFIG})
SMALL = 1 << 20
COMPANION = 256 << 20


@dataclass(frozen=True, slots=True)
class Replica:
    """A checkpoint that lies whole and proven in the destination. `pointers` were moved to it."""

    path: str
    files: tuple[Arrived, ...]
    pointers: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(f.entry.size for f in self.files)

    @property
    def sent(self) -> int:
        return sum(f.sent for f in self.files)


def replicate(
    source: Store,
    manifest: Manifest,
    destination: WritableStore,
    *,
    pointers: Sequence[Pointer] = (),
    overwrite: bool = False,
    now: float,
    progress: Progress | None = None,
) -> Replica:
    """Copy a checkpoint under the same key, prove it, then note it and move the pointers that name it.

    Raises Refused when other bytes lie there already (unless `overwrite`), StoreError when a side fails or what arrived
    differs. What was copied before a failure is gone on with the next time.
    """
    if destination.traits.atomic_rename:
        files = onto_disk(source, manifest, destination, overwrite, progress)
    else:
        files = _file_by_file(source, manifest, destination, overwrite, progress)
    _all_still_there(destination, manifest, files)
    _note(source, destination, manifest, files, now)
    moved = tuple(p.entry.key for p in pointers if _move_pointer(source, destination, p, manifest))
    return Replica(manifest.path, files, moved)


def _file_by_file(
    source: Store, manifest: Manifest, destination: Store, overwrite: bool, progress: Progress | None
) -> tuple[Arrived, ...]:
    """Data first, and when all of it has arrived, the files by which a reader takes the checkpoint for complete."""
    marks = [f for f in manifest.files if f.role in LAST and f.entry.size <= SMALL]
    data = [f for f in manifest.files if f not in marks]
    found: list[Arrived] = []
    with Copier(source, destination) as copier, ThreadPoolExecutor(FILES_AT_ONCE) as pool:

        def fetch(file: ManifestFile) -> Arrived:
            arrived = bring(copier, file.entry.source, file.entry.key, file.name, overwrite)
            if progress:
                progress(file.name, file.entry.size)
            return arrived

        for group in (data, marks):
            found += pool.map(fetch, group)
    return tuple(found)


# --- afterwards ---------------------------------------------------------------------------------------


def _all_still_there(destination: Store, manifest: Manifest, files: Sequence[Arrived]) -> None:
    """A last listing: nothing that was proven may have been replaced or deleted while the rest was copied."""
    for file in files:
        try:
            now = destination.stat(file.entry.key)
        except KeyNotFound:
            raise StoreError(
                f"{file.entry.key}: gone again from {destination.url}", "is a lifecycle rule at work?"
            ) from None
        if (now.size, now.etag) != (file.entry.size, file.entry.etag):
            raise StoreError(
                f"{file.entry.key}: replaced meanwhile on {destination.url}", "find out who else writes there"
            )


def _note(
    source: Store, destination: WritableStore, manifest: Manifest, files: Sequence[Arrived], now: float
) -> None:
    """Write the seal, fitted to the files that lie here now, and the receipt."""
    seal = _seal(source, manifest)
    if seal is not None:
        here = {f.name: f.entry for f in files}
        known = {f.name: f.entry for f in manifest.files}
        fitted = {
            name: sealed.model_copy(update={"modified": here[name].modified, "etag": here[name].etag})
            for name, sealed in seal.files.items()
            if name in here and sealed.fits(known[name])
        }
        write_seal(destination, "", seal.model_copy(update={"files": fitted}))
    _companions(source, destination, manifest.path)
    receipt = {
        "schema": 1,
        "checkpoint": manifest.path,
        "source": source.url,
        "verified": units.timestamp(now),
        "files": {
            f.name: {
                "size": f.entry.size,
                "etag": f.entry.etag,
                "crc64nvme": f.crc64nvme,
                "proven_by": f.proven_by,
            }
            for f in files
        },
    }
    destination.put(f"{RECEIPTS}/{manifest.path}.json", json.dumps(receipt, indent=1).encode() + b"\n")


def _seal(source: Store, manifest: Manifest) -> Seal | None:
    """The seal of this very save; a damaged one is not passed on."""
    try:
        seal = read_seal(source, "", manifest.path)
    except FormatError:
        return None
    return None if seal is None or seal.stale_for({f.name: f.entry for f in manifest.files}) else seal


def _companions(source: Store, destination: WritableStore, path: str) -> None:
    """Bring what a restore from the copy would want: the fixed batches of this save, and the step logs so far."""
    for entry in source.list(OURS):
        name = entry.key.removeprefix(f"{OURS}/")
        wanted = name == f"batches/{path}.safetensors" or (
            name.startswith("steps-") and name.endswith(".jsonl")
        )
        if not wanted or entry.size > COMPANION:
            continue
        try:
            shorter = destination.stat(entry.key).size < entry.size
        except KeyNotFound:
            shorter = True
        if shorter:
            destination.put(entry.key, source.read(entry.key, 0, entry.size))


def _move_pointer(source: Store, destination: WritableStore, pointer: Pointer, manifest: Manifest) -> bool:
    """Make the destination's pointer say what the source's says, unless it names a newer checkpoint already."""
    if pointer.kind != "text" or pointer.resolved != manifest.path:
        return False
    says, key = source.read(pointer.entry.key), pointer.entry.key
    for _ in range(5):
        try:
            there: Entry | None = destination.stat(key)
        except KeyNotFound:
            there = None
        if there is not None and not _older(destination, key, there, manifest, says):
            return False
        try:
            destination.put(key, says, if_absent=there is None, if_match=there.etag if there else None)
            return True
        except Refused:
            continue  # Another replicator moved it: look again at what it says now.
    raise Refused(f"{destination.url}/{key}: moved by others again and again", "run one replicator at a time")


def _older(destination: Store, key: str, there: Entry, manifest: Manifest, says: bytes) -> bool:
    """Whether a pointer of the destination may be moved on to `manifest`."""
    if there.size > 4096:
        return False
    now_says = destination.read(key, 0, there.size)
    if now_says == says:
        return False
    home = key.rpartition("/")[0]
    named = locate(build_directory(destination.list(home)), _relative(now_says, home))
    if named is None:
        return True
    current = step_in(named)
    return manifest.step is None or current is None or current < manifest.step


def _relative(says: bytes, home: str) -> str:
    text = says.decode("utf-8", "replace").strip()
    return f"{home}/{text}" if home else text

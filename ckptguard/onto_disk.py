"""Copies a checkpoint onto a disk: built below `.ckptguard/incoming/`, proven there, and put in place by a rename."""

from __future__ import annotations

import filecmp
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckptguard.arriving import (
    FILES_AT_ONCE,
    THERE_ALREADY,
    Arrived,
    Progress,
    alone,
    bring,
    enough_space,
)
from ckptguard.errors import KeyNotFound, Refused
from ckptguard.model import Manifest, ManifestFile
from ckptguard.ports import Store, WritableStore
from ckptguard.storage.transfer import Copier

INCOMING = ".ckptguard/incoming"
REPLACED = ".ckptguard/replaced"


def onto_disk(
    source: Store, manifest: Manifest, destination: WritableStore, overwrite: bool, progress: Progress | None
) -> tuple[Arrived, ...]:
    """The checkpoint appears whole, by one rename, or not at all; one that lies there already must be the same.

    With `overwrite` one that differs is exchanged for the copy and kept below `.ckptguard/replaced/`. Raises Refused,
    StoreError.
    """
    root = Path(destination.url)
    final = root / manifest.path
    if final.exists():
        try:
            return _compare_in_place(source, manifest, destination)
        except Refused:
            if not overwrite:
                raise
    staged = root / INCOMING / manifest.path
    enough_space(root, manifest.size - _size_of(staged))
    with alone(root / INCOMING / f"{manifest.path}.lock", str(final)):
        files = _stage(source, manifest, destination, progress)
        _drop_others(staged, root / INCOMING, manifest)
        if overwrite:
            _set_aside(root, manifest.path)
        _put_in_place(root, manifest)
    forget = getattr(destination, "forget", None)
    if forget is not None:
        forget()
    return tuple(
        Arrived(a.name, destination.stat(f.entry.key), a.crc64nvme, a.proven_by, a.sent)
        for a, f in zip(files, manifest.files, strict=True)
    )


def _stage(
    source: Store, manifest: Manifest, destination: WritableStore, progress: Progress | None
) -> tuple[Arrived, ...]:
    with Copier(source, destination) as copier, ThreadPoolExecutor(FILES_AT_ONCE) as pool:

        def fetch(file: ManifestFile) -> Arrived:
            # What an earlier copy left there is ours, and may be of an earlier save.
            to = f"{INCOMING}/{file.entry.key}"
            arrived = bring(copier, file.entry.source, to, file.name, overwrite=True)
            if progress:
                progress(file.name, file.entry.size)
            return arrived

        return tuple(pool.map(fetch, manifest.files))


def _drop_others(staged: Path, incoming: Path, manifest: Manifest) -> None:
    """Remove what a broken-off copy of an earlier save of that name left."""
    wanted = {incoming / f.entry.key for f in manifest.files}
    for path in staged.rglob("*") if staged.is_dir() else ():
        if path.is_file() and path not in wanted:
            path.unlink()


def _set_aside(root: Path, path: str) -> None:
    final, aside = root / path, root / REPLACED / path
    if not final.exists():
        return
    if aside.is_dir():
        shutil.rmtree(aside)
    aside.parent.mkdir(parents=True, exist_ok=True)
    final.replace(aside)


def _put_in_place(root: Path, manifest: Manifest) -> None:
    """What lies beside goes first, and the file or folder by which the checkpoint is known last."""
    final = root / manifest.path
    final.parent.mkdir(parents=True, exist_ok=True)
    for file in manifest.files:
        if file.entry.key != manifest.path and not file.entry.key.startswith(f"{manifest.path}/"):
            _rename_new(root / INCOMING / file.entry.key, root / file.entry.key)
    _rename_new(root / INCOMING / manifest.path, final)


def _rename_new(staged: Path, final: Path) -> None:
    try:
        if not staged.is_file():
            # An empty folder may be replaced by a rename; one with files in it refuses.
            staged.rename(final)
            return
        if not (final.is_file() and filecmp.cmp(staged, final, shallow=False)):
            final.hardlink_to(staged)
        staged.unlink()
    except OSError as error:
        raise Refused(
            f"{final}: something else was put there meanwhile; it was left as it is", "look at it"
        ) from error


def _compare_in_place(source: Store, manifest: Manifest, destination: Store) -> tuple[Arrived, ...]:
    """What lies there already must be the whole checkpoint, byte for byte."""
    with Copier(source, destination) as copier:
        arrived = []
        for file in manifest.files:
            try:
                same = copier.same(file.entry.source, file.entry.key)
            except KeyNotFound:
                same = False
            if not same:
                raise Refused(
                    f"{destination.url}/{file.entry.key}: missing or different in what lies there already; "
                    "it was left as it is",
                    f"ckptguard repair {destination.url}/{manifest.path} --from {source.url}",
                )
            entry = destination.stat(file.entry.key)
            arrived.append(Arrived(file.name, entry, copier.checksum(file.entry.key), THERE_ALREADY, 0))
    return tuple(arrived)


def _size_of(folder: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else 0

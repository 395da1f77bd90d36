"""Brings a checkpoint from an object store to this machine, proven, for what can only read files."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptguard.arriving import Progress
from ckptguard.errors import NothingRecognised
from ckptguard.model import Manifest
from ckptguard.places import place_of
from ckptguard.replica_look import list_tree
from ckptguard.replicate import replicate
from ckptguard.storage.local import LocalStore
from ckptguard.storage.opening import open_store

LARGEST_LOG = 64 << 20


def stage(target: str, folder: Path, *, progress: Progress | None = None) -> Path:
    """Bring a checkpoint into `folder` and return its path there; one that lies there already, the same, is kept.

    Raises Refused where the space does not suffice or other bytes lie there, NothingRecognised, StoreError. A local
    target is returned as it is.
    """
    if "://" not in target:
        return Path(target)
    place = place_of(target)
    source = open_store(place.run)
    tree = list_tree(source)
    manifest = _named(tree.checkpoints, place.key, target)
    folder.mkdir(parents=True, exist_ok=True)
    destination = LocalStore(folder)
    replicate(source, manifest, destination, now=time.time(), progress=progress)
    for entry in tree.root.files.values():
        # The run's own log lies beside its checkpoints; a restore compares with it.
        if entry.name.endswith((".jsonl", ".csv")) and entry.size <= LARGEST_LOG:
            destination.put(entry.key, source.read(entry.key, 0, entry.size))
    return folder / manifest.path


@contextmanager
def staged(target: str, parent: Path | None = None) -> Iterator[Path]:
    """A checkpoint as files of this machine, for as long as the block runs: a temporary, proven copy of a distant one."""
    if "://" not in target:
        yield Path(target)
        return
    folder = Path(tempfile.mkdtemp(prefix="ckptguard-stage-", dir=parent))
    try:
        yield stage(target, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _named(checkpoints: tuple[Manifest, ...], key: str, target: str) -> Manifest:
    for manifest in checkpoints:
        if manifest.path == key or any(f.entry.key == key for f in manifest.files):
            return manifest
    raise NothingRecognised(
        f"{target}: no checkpoint is recognised there", "name a checkpoint: ckptguard audit RUN lists them"
    )

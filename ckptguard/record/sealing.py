"""From a save that is done to its seal: the files' digests join what was known in memory before they were written."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ckptguard.errors import KeyNotFound, StoreError
from ckptguard.model import Entry
from ckptguard.seals import Seal, SealedFile, seal_file, write_seal
from ckptguard.storage.local import LocalStore

TRIES = 2


def checkpoint_key(run: Path, checkpoint: str | os.PathLike[str]) -> str:
    """The checkpoint's place relative to its run. Raises ValueError for one that lies elsewhere."""
    here, there = Path(run).absolute(), Path(checkpoint).absolute()
    # As written first: a checkpoint may be a link, or the run one, and its name is what counts.
    for base, path in ((here, there), (here.resolve(), there.resolve())):
        if path.is_relative_to(base) and path != base and ".." not in path.parts:
            return path.relative_to(base).as_posix()
    raise ValueError(f"{checkpoint} does not lie below the run {run}, where its seal would belong")


def write_seal_of(run: Path, draft: Seal, rank: int | None, *, with_files: bool) -> Seal:
    """Read the checkpoint's files once, add their digests to the draft, and write it. Returns what was written.

    A file that changes or goes meanwhile (a rotation, a save that still runs) is left out: no evidence is better than
    wrong evidence. Raises StoreError when the seal cannot be written.
    """
    began = time.perf_counter()
    store = LocalStore(run)
    try:
        files = _files(store, draft) if with_files else {}
        timings = {**draft.timings, "seal": time.perf_counter() - began}
        seal = draft.model_copy(update={"files": files, "timings": timings})
        write_seal(store, "", seal, rank)
    finally:
        store.close()
    return seal


def _files(store: LocalStore, draft: Seal) -> dict[str, SealedFile]:
    if store.path(draft.checkpoint).is_file():
        entries = [store.stat(draft.checkpoint)]
        names = [entries[0].name]
    else:
        entries = [entry for entry in store.list(draft.checkpoint) if entry.kind == "file"]
        names = [entry.key.removeprefix(f"{draft.checkpoint}/") for entry in entries]
    sealed = {}
    for name, entry in zip(names, entries, strict=True):
        file = _steady(store, entry, draft.block_size)
        if file is not None:
            sealed[name] = file
    return sealed


def _steady(store: LocalStore, entry: Entry, block_size: int) -> SealedFile | None:
    for _ in range(TRIES):
        try:
            sealed = seal_file(store, entry, block_size)
            now = store.stat(entry.key)
        except KeyNotFound:
            return None
        except StoreError:
            store.forget()
            continue
        if sealed.fits(now):
            return sealed
        entry = now
        store.forget()
    return None

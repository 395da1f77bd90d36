"""Where a checkpoint that somebody named lies: its run, and its key within the run."""

from __future__ import annotations

from dataclasses import dataclass

from ckptguard.errors import KeyNotFound, TargetNotFound, UsageError
from ckptguard.ports import Store
from ckptguard.storage.opening import open_store, split_target

OURS = ".ckptguard"


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint in its run. `run` is what a store is opened at; `key` the checkpoint's, "" when a run was named."""

    run: str
    key: str

    @property
    def path(self) -> str:
        return join(self.run, self.key)


def join(root: str, key: str) -> str:
    """The path or URL of a key below a root, as a user would write it."""
    if not key:
        return root
    return f"{root.rstrip('/')}/{key}" if root not in (".", "./") else key


def place_of(target: str) -> Place:
    """The run and the key of a checkpoint. What we keep of a run lies in `.ckptguard` of its folder, or one above.

    Raises TargetNotFound, UsageError, StoreError.
    """
    root, key = split_target(target)
    if key:
        home, name = root, key
    else:
        home, name = split_name(root)
    return in_its_run(home, name)


def in_its_run(home: str, name: str) -> Place:
    """The place of a checkpoint in the folder `home`: its run is the folder above where only that keeps things of ours."""
    if not _is_bucket(home) and not keeps(home):
        above, folder = split_name(home)
        if keeps(above):
            return Place(above, f"{folder}/{name}")
    return Place(home, name)


def _is_bucket(root: str) -> bool:
    return root.startswith("s3://") and "/" not in root.removeprefix("s3://").rstrip("/")


def split_name(target: str) -> tuple[str, str]:
    """(folder, name) of a target, whether it exists or not. Raises UsageError for a whole bucket."""
    if target.startswith("s3://"):
        head, slash, name = target.rstrip("/").removeprefix("s3://").rpartition("/")
        if not slash:
            raise UsageError(
                f"{target}: a whole bucket is no checkpoint",
                "name the checkpoint: s3://bucket/run/checkpoint",
            )
        return f"s3://{head}", name
    from pathlib import Path

    path = Path(target)
    if path.name in ("", "..", "."):
        path = path.resolve()
    return str(path.parent), path.name


def keeps(root: str) -> bool:
    """Whether something of ours lies directly below a folder."""
    try:
        store: Store = open_store(root)
        return next(iter(store.list(OURS)), None) is not None
    except (KeyNotFound, TargetNotFound, UsageError):
        return False

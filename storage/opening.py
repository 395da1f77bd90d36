"""Opens the store that a target names."""

from __future__ import annotations

from pathlib import Path

from ckptguard.errors import TargetNotFound, UsageError
from ckptguard.ports import Store
from ckptguard.storage.local import LocalStore


def split_target(target: str) -> tuple[str, str]:
    """(root, key) of a target: the folder to open a store at and the key inside it ("" for the folder itself)."""
    if target.startswith("s3://"):
        from ckptguard.storage.s3 import locate

        return locate(target)
    if "://" in target:
        return target, ""
    path = Path(target)
    if not path.exists() and not path.is_symlink():
        raise TargetNotFound(f"{target}: no such file or directory", "check the path; is the volume mounted?")
    if path.is_dir():
        return target, ""
    return str(path.parent), path.name


def open_store(root: str, *, max_rate: float | None = None, considerate: bool = False) -> Store:
    """A store rooted at a local directory or `s3://bucket/prefix`. Raises TargetNotFound, UsageError, StoreError.

    `considerate`: what it reads from a disk does not stay in the page cache.
    """
    scheme, mark, _ = root.partition("://")
    store: Store
    if not mark:
        store = LocalStore(root, considerate=considerate)
    elif scheme == "s3":
        from ckptguard.storage.readahead import ReadAhead
        from ckptguard.storage.s3 import S3Store

        store = ReadAhead(S3Store(root))
    else:
        raise UsageError(f"{root}: no store for {scheme}://", "give a local path or s3://bucket/prefix")
    if max_rate:
        from ckptguard.storage.limited import Limited

        store = Limited(store, max_rate)
    return store

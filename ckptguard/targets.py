"""From what the user names to a store, its listing and the checkpoints in it."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ckptguard.discover import find_checkpoints
from ckptguard.layouts._base import build_directory
from ckptguard.model import Directory, Evidence, Manifest
from ckptguard.ports import Store
from ckptguard.registry import layouts

GRACE = 900.0


@dataclass(frozen=True, slots=True)
class Options:
    """How to look. `grace` in seconds; `max_rate` in bytes a second; `require` makes anything less proven unknown.

    `silenced`: reasons by code. `deadline`: epoch seconds after which nothing more is read. `max_age`: a recorded verdict
    so many seconds old is taken. `also`: further roots, of which the target is the union.
    """

    depth: Evidence = Evidence.CONTENT
    jobs: int | None = None
    grace: float = GRACE
    max_rate: float | None = None
    require: Evidence | None = None
    allow_lossy: bool = False
    plan: object = None
    silenced: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    deadline: float | None = None
    max_age: float | None = None
    also: tuple[str, ...] = ()
    now: Callable[[], float] = field(default=time.time)


@dataclass(frozen=True, slots=True)
class Opened:
    """A store with what was asked for in it. `prefix` is put before keys when paths are printed; `only` narrows the report."""

    store: Store
    prefix: str
    only: str | None = None

    def shown(self, key: str) -> str:
        return f"{self.prefix}{key}" if key else self.prefix.rstrip("/") or "."


def open_target(target: str, options: Options) -> tuple[Opened, Directory, list[Manifest]]:
    """The store of a target, its listing and the checkpoints in it. A checkpoint named directly is seen among its siblings.

    Raises TargetNotFound, UsageError, StoreError.
    """
    from ckptguard.storage.opening import split_target

    root, key = split_target(target)
    inner = "" if options.also else _recorded_above(root if key else _split(target)[0], options)
    if inner:
        # The run that was recorded is the folder above: its seals and its log are there.
        folder, name = (root, key) if key else _split(target)
        upper, _ = _split(folder)
        opened = open_roots([upper or "."], options)
        directory = build_directory(opened.list())
        manifests = find_checkpoints(directory, layouts())
        wanted = f"{inner}/{name}"
        named = next(
            (m for m in manifests if m.path == wanted or any(f.entry.key == wanted for f in m.files)), None
        )
        if named is not None:
            return Opened(opened, _prefix(upper or ".", upper), named.path), directory, manifests
    store = open_roots([root, *options.also], options)
    prefix = _prefix(root, target)
    if key:
        directory = build_directory(store.list())
        manifests = find_checkpoints(directory, layouts())
        named = next((m for m in manifests if any(f.entry.key == key for f in m.files)), None)
        return Opened(store, prefix, named.path if named else key), directory, manifests
    directory = build_directory(store.list())
    manifests = find_checkpoints(directory, layouts())
    if len(manifests) == 1 and manifests[0].path == "":
        parent, name = _split(target)
        if name:
            # Other roots are known as this checkpoint's parts; beside the others they lie only where they have its name.
            beside = [_split(a)[0] or "." for a in options.also if _split(a)[1] == name]
            if len(beside) < len(options.also):
                return Opened(store, prefix), directory, manifests
            above = open_roots([parent or ".", *beside], options)
            directory = build_directory(above.list())
            return (
                Opened(above, _prefix(parent or ".", parent), name),
                directory,
                find_checkpoints(directory, layouts()),
            )
    return Opened(store, prefix), directory, manifests


def _recorded_above(folder: str, options: Options) -> str:
    """The name of a `checkpoints` folder whose own parent holds what was recorded of the run; "" for any other."""
    above, name = _split(folder) if folder else ("", "")
    if name not in ("checkpoints", "checkpoint", "ckpts"):
        return ""
    ours = open_roots([above or "."], options).list(".ckptguard")
    return name if next(iter(ours), None) is not None else ""


def open_roots(roots: Sequence[str], options: Options) -> Store:
    """A store of one root or the union of several, as slow, as considerate and for as long as the options say."""
    from ckptguard.storage import open_store

    stores = [open_store(root, considerate=options.max_rate is not None) for root in roots]
    store: Store = stores[0]
    if len(stores) > 1:
        from ckptguard.storage.union import Union

        store = Union(stores)
    if options.max_rate:
        from ckptguard.storage.limited import Limited

        store = Limited(store, options.max_rate)
    if options.deadline is not None:
        from ckptguard.storage.timed import Timed

        store = Timed(store, options.deadline, options.now)
    return store


def _prefix(root: str, given: str) -> str:
    if not given or given == "." or (root == "." and "/" not in given):
        return ""
    return root.rstrip("/") + "/"


def _split(target: str) -> tuple[str, str]:
    """(folder, name) of a directory target; ("", "") where there is nothing above it."""
    plain = target.rstrip("/")
    if plain in ("", ".", "..") or plain.endswith("://"):
        return "", ""
    parent, name = posixpath.split(plain)
    if "://" in target and "://" not in parent:
        return "", ""  # above a bucket there is nothing
    return parent, name

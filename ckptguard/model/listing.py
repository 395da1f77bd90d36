"""What a store lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that a store lists. `key` is a posix path relative to the store's root; times are epoch seconds.

    `kind` is file, link or other (FIFO, device, socket: never opened). `target` is what a link says, as written;
    `resolved` is the key it leads to inside the store, or None when it dangles, loops or leads outside.
    """

    key: str
    size: int
    modified: float
    kind: str = "file"
    target: str | None = None
    resolved: str | None = None
    etag: str | None = None

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def source(self) -> str:
        """The key under which its bytes lie: for a link inside the store, where it leads."""
        return self.resolved if self.kind == "link" and self.resolved else self.key

    @property
    def identity(self) -> tuple[int, float, str | None]:
        """What changes when the bytes are replaced: size, time, entity tag."""
        return (self.size, self.modified, self.etag)


@dataclass(frozen=True, slots=True)
class Directory:
    """A folder of a listing: what layouts look at. Works the same for disks and object stores.

    `beside` are the files of the folder that it lies in, where a framework may keep a mark about it. `modified` is the
    folder's own time, where the store has folders.
    """

    path: str
    files: Mapping[str, Entry]
    dirs: Mapping[str, Directory]
    beside: Mapping[str, Entry] = field(default_factory=lambda: MappingProxyType({}))
    modified: float = 0.0

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def walk(self) -> Iterator[Entry]:
        """Every entry below, files of a folder before those of its sub-folders."""
        for _, entry in sorted(self.files.items()):
            yield entry
        for _, sub in sorted(self.dirs.items()):
            yield from sub.walk()

    def find(self, relative: str) -> Entry | None:
        """The entry at a path below this directory, or None."""
        *parents, name = relative.split("/")
        here: Directory | None = self
        for part in parents:
            here = here.dirs.get(part) if here else None
        return here.files.get(name) if here else None

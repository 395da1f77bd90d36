"""What a layout claims, from names alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckptguard.model.listing import Entry
from ckptguard.model.words import Role


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file of a checkpoint. `name` is relative to the checkpoint (its own name, for a one-file checkpoint).

    `format` names the reader in `ckptguard.formats`: torch, safetensors, json, pickle, dcp-metadata, dcp-shard,
    text, yaml, opaque (never parsed). `rank` is the process that wrote it, where the name tells.
    """

    name: str
    entry: Entry
    role: Role = Role.OTHER
    format: str = "opaque"
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Absence:
    """Something that the layout, by names alone, sees is not there. Becomes a finding with this code."""

    code: str
    subject: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint claims to be, from names alone. `path` is the key of its file or directory in the store.

    `carries` are the components that this layout normally saves (see `components` in the contract); `gaps` are those
    that the framework itself never saves; `documented_absent` those that it documents to leave out of this very save.
    `certain` is False for a lone file whose name says nothing: it counts only if its content is a checkpoint's.
    `finished` is False when a mark says that the save did not end.
    """

    path: str
    layout: str
    files: tuple[ManifestFile, ...]
    step: int | None = None
    carries: frozenset[str] = frozenset({"model", "optimizer", "scheduler", "rng"})
    gaps: tuple[str, ...] = ()
    documented_absent: frozenset[str] = frozenset()
    absences: tuple[Absence, ...] = ()
    certain: bool = True
    finished: bool = True
    temporary: bool = False
    series: str = ""
    attributes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def size(self) -> int:
        return sum(f.entry.size for f in self.files)

    @property
    def modified(self) -> float:
        return max((f.entry.modified for f in self.files), default=self.attributes.get("modified", 0.0))

    def file(self, name: str) -> ManifestFile | None:
        return next((f for f in self.files if f.name == name), None)

    def by_role(self, role: Role) -> tuple[ManifestFile, ...]:
        return tuple(f for f in self.files if f.role is role)


@dataclass(frozen=True, slots=True)
class Pointer:
    """A file or link by which a run names a checkpoint. `kind`: text, link, symlink-object, universal, best.

    `names` is what it says, as written; `resolved` the key of the checkpoint, or None when there is none.
    """

    entry: Entry
    kind: str
    names: str
    resolved: str | None
    layout: str = ""

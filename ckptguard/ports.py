"""The protocols that plug-ins fulfil. One new framework, check, backend, sink or hypothesis is one new file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ckptguard.model import (
    CheckpointFacts,
    Directory,
    Entry,
    Evidence,
    FileFacts,
    Finding,
    LogRow,
    Manifest,
    Pointer,
    State,
    Verdict,
)


@dataclass(frozen=True, slots=True)
class Traits:
    """What a store can do; asked for instead of its type.

    `local`: keys are files of this machine's file system. `request_bytes`: how many bytes it is cheaper to read and
    throw away than to make another request (0 for disks). `ordered_times`: modification times are those of the write,
    not of a copy. `atomic_rename`, `links`, `versions`, `checksums`: as the names say.
    """

    local: bool = True
    request_bytes: int = 0
    atomic_rename: bool = True
    links: bool = True
    versions: bool = False
    checksums: bool = False


Fill = Callable[[memoryview], None]
"""Fills a buffer with the next bytes. Raises ShortRead, KeyNotFound, StoreError."""


@runtime_checkable
class Store(Protocol):
    """Where checkpoints lie: keys below one root, read-only. All methods may be called from several threads."""

    @property
    def traits(self) -> Traits:
        """What this store can do."""

    @property
    def url(self) -> str:
        """How people name it; no secrets in it."""

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every entry whose key lies below `prefix` (a folder). Raises StoreError; never follows links to folders outside."""

    def stat(self, key: str) -> Entry:
        """The entry as it is now. Raises KeyNotFound, StoreError."""

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Exactly `length` bytes from `start` (to the end, if None). Raises ShortRead, KeyNotFound, StoreError."""

    def readinto(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start`. Raises ShortRead, KeyNotFound, StoreError."""

    def stream(self, key: str, start: int, end: int) -> AbstractContextManager[Fill]:
        """The bytes [start, end) in order, for one thread: each call fills a buffer with the next ones."""

    def fresh(self, key: str) -> Store | None:
        """A store that reads `key` past every cache, for a second look, or None where that is not possible."""


@runtime_checkable
class WritableStore(Store, Protocol):
    """A store that commands which were asked to change something may write to."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> Entry:
        """Write a small object atomically. Raises Refused when a condition does not hold."""

    def delete(self, key: str) -> None: ...


Resolve = Callable[[Directory], "Manifest | None"]
"""Finds the layout of a nested directory, for layouts that hold another one (DeepSpeed inside the Trainer)."""


class Layout(Protocol):
    """How one framework lays a checkpoint out. `order` is the place in the table of detection: lowest first.

    `claim` works on names alone, so that a listing of an object store serves. It returns the checkpoints that it
    recognises in exactly this directory: one whose path is the directory's, or several of its files.
    """

    name: str
    order: int

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]: ...

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        """What the files mean. Called with whatever could be read; never raises for absent parts."""

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        """The latest pointers that this framework keeps in this directory; `read` gives a small file's bytes."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a checkpoint check looks at: its facts, its neighbours (all of the run by step, itself included), the log.

    `previous` is the nearest earlier sibling that was read and is not known to be unsafe: a sound checkpoint is not to be
    accused of differing from a broken one. `unsafe` are the paths of those that are. `log` holds the rows of the run's log, oldest first.
    `now` is the clock's time in epoch seconds. `plan` is the launch plan, where one was given.
    """

    facts: CheckpointFacts
    siblings: tuple[CheckpointFacts, ...]
    log: tuple[LogRow, ...]
    now: float
    grace: float = 0.0
    store: Store | None = None
    plan: Any = None
    unsafe: frozenset[str] = frozenset()

    @property
    def previous(self) -> CheckpointFacts | None:
        step = self.facts.step
        if step is None:
            return None
        earlier = [
            s
            for s in self.siblings
            if s.step is not None
            and s.step < step
            and s.manifest.series == self.facts.manifest.series
            and s.path not in self.unsafe
        ]
        return max(earlier, key=lambda s: s.step or 0, default=None)

    @property
    def others(self) -> tuple[CheckpointFacts, ...]:
        return tuple(s for s in self.siblings if s.path != self.facts.path)


class Check(Protocol):
    """One check: pure, over facts. Docstring headings: Finds / Why it matters / Example / What to do / Blind spots."""

    name: str
    needs: Evidence
    codes: tuple[str, ...]

    def run(self, subject: Subject) -> Iterable[Finding]: ...


@dataclass(frozen=True, slots=True)
class RunSubject:
    """What a run check looks at: the whole run with the verdicts on its checkpoints."""

    root: Directory
    facts: tuple[CheckpointFacts, ...]
    verdicts: tuple[Verdict, ...]
    pointers: tuple[Pointer, ...]
    leftovers: tuple[Manifest, ...]
    log: tuple[LogRow, ...]
    now: float
    grace: float


class RunCheck(Protocol):
    """One check of a run, after its checkpoints were judged."""

    name: str
    codes: tuple[str, ...]

    def run(self, subject: RunSubject) -> Iterable[Finding]: ...


class LogReader(Protocol):
    """Reads one kind of metric log."""

    name: str

    def claims(self, name: str) -> bool: ...

    def rows(self, data: bytes) -> Sequence[LogRow]: ...


class AlertSink(Protocol):
    """Sends one alert. Raises on failure: the outbox tries again."""

    def send(self, alert: Mapping[str, Any]) -> None: ...


class Hypothesis(Protocol):
    """One way in which a resume may have gone wrong: withholds or changes one component before the replay."""

    name: str
    blame: str

    def apply(self, parts: dict[str, Any], checkpoint: Any) -> None: ...


class Recipe(Protocol):
    """What a user gives to restore into; see the contract."""

    def build(self, device: str) -> dict[str, Any]: ...

    def step(self, parts: dict[str, Any]) -> dict[str, Any]: ...

"""The frozen data that the layers pass to one another. Standard library only.

    target ─Store→ Entry ─Layout→ Manifest ─one pass→ FileFacts ─Layout→ State ─Checks→ Finding ─judge→ Verdict
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any


class _Ordered(StrEnum):
    """A string enumeration whose members compare by their order of declaration."""

    @property
    def rank(self) -> int:
        return list(type(self)).index(self)

    def __lt__(self, other: str) -> bool:
        return self.rank < type(self)(other).rank

    def __le__(self, other: str) -> bool:
        return self.rank <= type(self)(other).rank

    def __gt__(self, other: str) -> bool:
        return self.rank > type(self)(other).rank

    def __ge__(self, other: str) -> bool:
        return self.rank >= type(self)(other).rank


class Severity(_Ordered):
    """How loud a finding is. Only warning and error are alarms."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Effect(_Ordered):
    """What a finding does to the resume of its checkpoint."""

    NONE = "none"
    LOSSY = "lossy"
    UNKNOWN = "unknown"
    UNSAFE = "unsafe"


class Evidence(_Ordered):
    """How deep a look went; each level includes the ones before."""

    LISTING = "listing"
    STRUCTURE = "structure"
    CONTENT = "content"
    RESTORED = "restored"
    REPLAYED = "replayed"


class Resume(StrEnum):
    """What a verdict says of resuming from a checkpoint."""

    EXACT = "exact"
    LOSSY = "lossy"
    UNKNOWN = "unknown"
    UNSAFE = "unsafe"
    WRITING = "writing"

    @property
    def safe(self) -> bool:
        return self in (Resume.EXACT, Resume.LOSSY)


class Role(StrEnum):
    """Which part of the training state a file holds. BUNDLE: several in one file; its content tells."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    RNG = "rng"
    SCALER = "scaler"
    DATALOADER = "dataloader"
    TRAINER_STATE = "trainer_state"
    EMA = "ema"
    CONFIG = "config"
    TOKENIZER = "tokenizer"
    INDEX = "index"
    METADATA = "metadata"
    ARGS = "args"
    BUNDLE = "bundle"
    SHARD = "shard"
    OTHER = "other"


# --- what a store lists -------------------------------------------------------------------------------


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
    def identity(self) -> tuple[int, float, str | None]:
        """What changes when the bytes are replaced: size, time, entity tag."""
        return (self.size, self.modified, self.etag)


@dataclass(frozen=True, slots=True)
class Directory:
    """A folder of a listing: what layouts look at. Works the same for disks and object stores.

    `beside` are the files of the folder that it lies in, where a framework may keep a mark about it.
    """

    path: str
    files: Mapping[str, Entry]
    dirs: Mapping[str, Directory]
    beside: Mapping[str, Entry] = field(default_factory=lambda: MappingProxyType({}))

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


# --- what a layout claims -----------------------------------------------------------------------------


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
        return max((f.entry.modified for f in self.files), default=0.0)

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


# --- what reading finds out ---------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor as its file describes it: not loaded. dtype is torch's name ("bfloat16"), nbytes that of its extent.

    `start` is the byte offset of its first element in the file, None when the file holds no bytes for it (meta,
    empty). `storage` names the record that it lies in; tensors with the same storage share memory. `value` is a numpy
    array for small tensors that were read. Filled by the reader that makes it, and not changed after.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int | None = None
    nbytes: int = 0
    strides: tuple[int, ...] | None = None
    storage: str = ""
    location: str = "cpu"
    contiguous: bool = True
    value: Any = None
    facts: TensorFacts | None = None
    local_of: str = ""

    @property
    def numel(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n

    def scalar(self) -> int | float | None:
        """The one number in it, or None where it has several or was not read."""
        if self.value is None or getattr(self.value, "size", 0) != 1:
            return None
        number: int | float = self.value.reshape(()).item()
        return number


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What reading a tensor's bytes found. `minimum` and `maximum` are of the finite values (None where there are none).

    `digest` is `ckptguard.digest`'s tensor digest: equal bytes give equal digests, wherever they lie.
    """

    digest: str
    nbytes: int
    nan: int = 0
    inf: int = 0
    minimum: float | None = None
    maximum: float | None = None
    norm: float | None = None
    zeros: bool = False

    @property
    def finite(self) -> bool:
        return not self.nan and not self.inf


@dataclass(frozen=True, slots=True)
class GlobalUse:
    """A name that a pickle refers to, and how: named, called, built (NEWOBJ, BUILD), enum (called with one str or int)."""

    name: str
    how: str


@dataclass(frozen=True, slots=True)
class Problem:
    """What a reader found wrong: a finding code, where (a record or tensor of the file, or ""), and the numbers.

    A code with the severity lowered by a legitimate exception carries it in `severity` and `effect`.
    """

    code: str
    where: str
    message: str
    severity: str = ""
    effect: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What reading one file found out. `tree` is its small content with Tensor objects in place of the big one.

    `read` is how far it was read (listing: not opened). `bytes_proven` counts bytes that matched a checksum or digest.
    `blocks` are the digests of its blocks, where they were asked for.
    """

    name: str
    read: Evidence
    kind: str = ""
    tree: Any = None
    tensors: tuple[Tensor, ...] = ()
    globals: tuple[GlobalUse, ...] = ()
    problems: tuple[Problem, ...] = ()
    bytes_read: int = 0
    bytes_proven: int = 0
    checksummed: int = 0
    blocks: tuple[str, ...] = ()
    block_size: int = 0
    digest: str = ""
    tail: int = 0
    details: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


# --- what a layout makes of it ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counter:
    """A step that some part of the checkpoint states. `unit`: step, epoch, micro-batch, save, samples, unknown."""

    name: str
    value: int
    subject: str
    unit: str = "step"


@dataclass(frozen=True, slots=True)
class ParamState:
    """Optimizer state of one parameter: `values` maps exp_avg, step, ... to Tensors and numbers."""

    key: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One parameter group: its hyper-parameters, and the keys of its parameters in order."""

    options: Mapping[str, Any]
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """One optimizer's state dictionary. `sharded`: flat or partitioned, so shapes are not the parameters'."""

    subject: str
    groups: tuple[ParamGroup, ...]
    states: tuple[ParamState, ...]
    rank: int | None = None
    sharded: bool = False
    name: str = ""
    named: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """One learning-rate scheduler's state dictionary, as saved."""

    subject: str
    values: Mapping[str, Any]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class RngState:
    """The random generators of one process: `streams` maps python, numpy, torch, cuda to what was saved."""

    subject: str
    rank: int | None
    streams: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ScalerState:
    subject: str
    values: Mapping[str, Any]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Where a data loader stands. `values` as saved."""

    subject: str
    values: Mapping[str, Any]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class LogRow:
    """One line of a metric log. Numbers are as logged; `span` is how many steps the row averages over."""

    step: int
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    epoch: float | None = None
    attempt: int | None = None
    span: int = 1
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint holds, in the field's common terms, whatever framework wrote it.

    `model` and `ema` map parameter names to Tensors (with FILE:TENSOR in `subjects`). `topology` has world_size, tp,
    pp, ... where recorded. `layout` may name a more precise layout than the listing could, and `gaps` what that one
    never saves.
    """

    layout: str = ""
    model: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    ema: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    subjects: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    optimizers: tuple[OptimizerState, ...] = ()
    schedulers: tuple[SchedulerState, ...] = ()
    rngs: tuple[RngState, ...] = ()
    scalers: tuple[ScalerState, ...] = ()
    loaders: tuple[LoaderState, ...] = ()
    counters: tuple[Counter, ...] = ()
    config: Mapping[str, Any] | None = None
    config_subject: str = "config.json"
    tokenizer_size: int | None = None
    tokenizer_subject: str = ""
    topology: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    replicated: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    masters: tuple[tuple[str, Tensor, Tensor], ...] = ()
    log: tuple[LogRow, ...] = ()
    step: int | None = None
    skipped_steps: int | None = None
    components: Mapping[str, bool | None] = field(default_factory=lambda: MappingProxyType({}))
    problems: tuple[tuple[str, Problem], ...] = ()
    lr_multiplies: bool = False
    save_id: str = ""
    gaps: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def subject(self, tensor: Tensor, default: str = "") -> str:
        return self.subjects.get(id(tensor), default or tensor.name)


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Everything known of one checkpoint: what it claims, what its files hold, what that means."""

    manifest: Manifest
    files: Mapping[str, FileFacts]
    state: State
    evidence: Evidence
    seal: Any = None
    changed: bool = False

    @property
    def path(self) -> str:
        return self.manifest.path

    @property
    def step(self) -> int | None:
        return self.state.step if self.state.step is not None else self.manifest.step


# --- what is said of it -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was seen. `subject` is FILE, or FILE:TENSOR where the tensor is known."""

    code: str
    severity: Severity
    effect: Effect
    subject: str
    message: str
    hint: str = ""

    @property
    def loud(self) -> bool:
        return self.severity > Severity.INFO


@dataclass(frozen=True, slots=True)
class NotRun:
    """A check that did not run, and why: a gap, never a success."""

    check: str
    why: str


@dataclass(frozen=True, slots=True)
class Coverage:
    checks: int = 0
    not_run: tuple[NotRun, ...] = ()
    bytes_read: int = 0
    bytes_proven: int = 0
    unprovable: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the training was well around this step, from its curves: another fact than integrity."""

    status: str = "unknown"
    since_step: int | None = None
    steps_to_discard: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of one checkpoint. Never true or false: compare `resume`."""

    path: str
    layout: str
    step: int | None
    resume: Resume
    evidence: Evidence
    files: int
    bytes: int
    components: Mapping[str, bool | None]
    gaps: tuple[str, ...]
    coverage: Coverage
    health: Health
    findings: tuple[Finding, ...]
    attempt: int | None = None
    modified: float = 0.0

    def __bool__(self) -> bool:
        raise TypeError("compare verdict.resume; a verdict is neither true nor false")

    @property
    def as_complete_as_the_run_allows(self) -> bool:
        """Exact, or lossy in nothing but what the run is configured not to save (those findings are info)."""
        if self.resume is Resume.EXACT:
            return True
        return self.resume is Resume.LOSSY and not any(f.effect is Effect.LOSSY and f.loud for f in self.findings)


@dataclass(frozen=True, slots=True)
class RunReport:
    """What is said of one run. `checkpoints` is sorted by step, those without a known step first."""

    target: str
    root: str
    checkpoints: tuple[Verdict, ...]
    findings: tuple[Finding, ...]
    latest: str | None
    newest_safe: str | None
    resume_from: str | None

    def __bool__(self) -> bool:
        raise TypeError("look at the verdicts; a report is neither true nor false")

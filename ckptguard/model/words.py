"""The enumerations that findings and verdicts speak in."""

from __future__ import annotations

from enum import StrEnum


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

"""What reading a file finds out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckptguard.model.words import Evidence


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
    `zero_pages` counts pages of 4096 zero bytes, in tensors that no checksum covers.
    """

    digest: str
    nbytes: int
    nan: int = 0
    inf: int = 0
    minimum: float | None = None
    maximum: float | None = None
    norm: float | None = None
    zeros: bool = False
    zero_pages: int = 0

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

"""What layouts of several processes state about their ranks' files, for the checks of ranks and partitions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptguard.model import Absence, OptimizerState, Tensor

RANK_FILES = "rank_files"
PARTITIONS = "partitions"
SAMPLES = "samples"
RANK_PARTS = "rank_parts"
REPLICAS = "replicas"
PADDING = "padding"  # of tensors by id: stretches (start, numel) that are no one's, and may hold anything


@dataclass(frozen=True, slots=True)
class RankFiles:
    """One kind of file that every rank writes. `pattern` has one {} for the rank, relative to the checkpoint.

    `expected` is the number of ranks that the content records and `recorded_in` says where; `present` are those there.
    """

    what: str
    pattern: str
    expected: int
    present: frozenset[int]
    recorded_in: str


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a partitioned group: numbers of elements. `moments`: of each moment; `padding`: what only those have."""

    subject: str
    rank: int
    numel: int
    moments: tuple[int, ...] = ()
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Partition:
    """A group of parameters flattened and cut over the ranks.

    `wanted` is what all parts must hold together; None where it is not recorded. `align`: each sum may be rounded up to a
    multiple of it. `equal`: every rank holds as many elements as any other.
    """

    name: str
    wanted: int | None
    parts: tuple[Part, ...]
    align: int = 1
    equal: bool = False
    complete: bool = True


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank's file holds of something that is cut over the ranks, so that no two ranks hold the same.

    `what` names the whole, alike for all its ranks. `moments` are the first moments that move `weights` (where these are
    no moments themselves), `second` the second ones.
    """

    what: str
    rank: int
    file: str
    weights: tuple[Tensor, ...] = ()
    moments: tuple[Tensor, ...] = ()
    second: tuple[Tensor, ...] = ()


def moments_of(optimizer: OptimizerState, key: str = "exp_avg") -> tuple[Tensor, ...]:
    """One kind of moment of every parameter that has it."""
    found = (state.values.get(key) for state in optimizer.states)
    return tuple(v for v in found if isinstance(v, Tensor) and v.numel)


@dataclass(frozen=True, slots=True)
class Replicas:
    """A tensor that several ranks hold alike: each file's copy of it."""

    name: str
    copies: tuple[tuple[str, Tensor], ...]


# What tensor-parallel ranks hold alike: norms, and the biases of layers whose rows are cut.
REPLICATED = re.compile(
    r"norm[\w.]*(weight|bias)$|(^|\.)(dense|dense_4h_to_h|linear_proj|linear_fc2)\.bias$", re.IGNORECASE
)


def replicas(held: Iterable[tuple[str, str, Tensor]]) -> tuple[Replicas, ...]:
    """Of (name, file, tensor) those that are the same on every rank, where several files have one."""
    copies: dict[str, list[tuple[str, Tensor]]] = {}
    for name, file, tensor in held:
        if REPLICATED.search(name):
            copies.setdefault(name, []).append((file, tensor))
    return tuple(Replicas(name, tuple(found)) for name, found in copies.items() if len(found) > 1)


@dataclass(frozen=True, slots=True)
class Samples:
    """How many samples a checkpoint says were consumed, and how many each step takes by its own configuration."""

    subject: str
    name: str
    consumed: int
    batch: int
    how: str


MOST = 16  # a lost node takes many ranks with it: one absence a rank up to here, the last of which counts the rest


def absent_ranks(what: str, pattern: str, ranks: Iterable[int], least: int = 0) -> list[Absence]:
    """What names alone show: ranks between 0 and the highest seen (or `least` - 1) without their file."""
    known = set(ranks)
    world = max(least, max(known, default=-1) + 1)
    missing = sorted(set(range(world)) - known)
    absent = []
    for place, rank in enumerate(missing[:MOST], 1):
        more = f" (nor have {len(missing) - MOST} more ranks)" if place == MOST < len(missing) else ""
        message = f"rank {rank} has no {what} here{more}; {len(known)} of at least {world} ranks do"
        absent.append(Absence("missing-rank", pattern.format(rank), message))
    return absent


def numbers(values: Mapping[str, object]) -> dict[str, int]:
    """The integers of a mapping, True and False left out."""
    return {k: v for k, v in values.items() if isinstance(v, int) and not isinstance(v, bool)}

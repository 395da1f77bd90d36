from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckptguard.codes import finding
from ckptguard.errors import FormatError, StoreError
from ckptguard.formats import load_array
from ckptguard.model import CheckpointFacts, Effect, Evidence, Finding, Severity
from ckptguard.ports import Store, Subject
from ckptguard.validators._values import piece

MOST_ELEMENTS = 16 << 20  # of all masters of one checkpoint: 64 MiB are read a second time, at most
PIECE = 256 << 10
FEW = 0.05
MOST_REQUESTS = 32
# One unit in the last place of each type, relative to the number: what rounding, also a stochastic one, may change.
ROUNDING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
SMALLEST = {"bfloat16": 2.0**-133, "float16": 2.0**-24}


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the weights of one file are from their masters in another."""

    elements: int
    different: int
    worst: float
    name: str
    master: str
    weight: str


class Masters:
    """Whether half-precision weights are their fp32 masters, rounded.

    Finds: weights and master weights of two different saves, or of two different models, in one checkpoint.
    Why it matters: optimizers step from the masters: the weights that were evaluated are not those that training goes on with.
    Example: model states of step 1000 beside optimizer partitions of step 2000.
    What to do: take the files of one save from a replica, or resume from the checkpoint before.
    Blind spots: of large models a spread sample is compared (64 MiB of masters); stage 3 saves no second copy to compare.
    """

    name = "masters"
    needs = Evidence.CONTENT
    codes = ("mixed-saves",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        if subject.store is None or not subject.facts.state.masters:
            return
        found: dict[str, list[Difference]] = defaultdict(list)
        for difference in _compare(subject.facts, subject.store):
            found[difference.master].append(difference)
        for master, parts in found.items():
            differing = [d for d in parts if d.different]
            if not differing:
                continue
            worst = max(differing, key=lambda d: d.worst)
            different, elements = sum(d.different for d in parts), sum(d.elements for d in parts)
            # A script may set a parameter or two by hand after the step (a clamped temperature); a save changes nearly all.
            few = different < FEW * elements and len(differing) * 2 <= len(parts)
            yield finding(
                "mixed-saves",
                master,
                f"{different} of {elements} master weights in {master} do not round to the weights in {worst.weight} (the furthest is {worst.name}, by {worst.worst:.3g}): "
                + (
                    "those were set by other means than the optimizer"
                    if few
                    else "these files are not of one save"
                ),
                "nothing, if a script sets these parameters itself" if few else "",
                severity=Severity.INFO if few else None,
                effect=Effect.NONE if few else None,
            )


def _compare(facts: CheckpointFacts, store: Store) -> Iterator[Difference]:
    pairs = facts.state.masters
    if store.traits.request_bytes:  # where requests cost, some parameters speak for all
        pairs = pairs[:: -(-len(pairs) // MOST_REQUESTS)]
    total = sum(master.numel for _, master, _ in pairs)
    share = min(1.0, MOST_ELEMENTS / total) if total else 1.0
    for name, master, weight in pairs:
        files = facts.state.subject(master).partition(":")[0], facts.state.subject(weight).partition(":")[0]
        entries = [facts.manifest.file(f) for f in files]
        if entries[0] is None or entries[1] is None or weight.dtype not in (*ROUNDING, "float32"):
            continue
        different, compared, worst = 0, 0, 0.0
        for start, numel in _sample(master.numel, share):
            try:
                a = load_array(
                    store, entries[0].entry.key, entries[0].entry.size, piece(master, start, numel)
                )
                b = load_array(
                    store, entries[1].entry.key, entries[1].entry.size, piece(weight, start, numel)
                )
            except (FormatError, StoreError):
                break  # said already, by the checks of containers and of reading
            gap = _gap(a, b, weight.dtype)
            compared += numel
            different += int(np.count_nonzero(gap))
            worst = max(worst, float(gap.max(initial=0.0)))
        if compared:
            yield Difference(compared, different, worst, name, files[0], files[1])


def _gap(master: np.ndarray, weight: np.ndarray, dtype: str) -> np.ndarray:
    """How far each weight is from its master, 0 where rounding explains it. NaN and Inf are other checks' business."""
    master, weight = master.astype(np.float64).reshape(-1), weight.astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore"):
        gap = np.abs(master - weight)
        allowed = np.abs(master) * ROUNDING.get(dtype, 0.0) + SMALLEST.get(dtype, 0.0)
    return np.where(np.isfinite(gap) & (gap > allowed), gap, 0.0)


def _sample(numel: int, share: float) -> Sequence[tuple[int, int]]:
    """Stretches of a tensor to compare: all of it, or pieces spread evenly over it."""
    if share >= 1.0:
        return [(at, min(PIECE, numel - at)) for at in range(0, numel, PIECE)]
    wanted = max(1, int(numel * share))
    length = min(PIECE, wanted, 4096)
    count = -(-wanted // length)
    stride = max(length, numel // count)
    return [(at, min(length, numel - at)) for at in range(0, numel, stride)]


CHECK = Masters()

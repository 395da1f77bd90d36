from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptguard.codes import finding
from ckptguard.layouts._ranks import REPLICAS, Replicas
from ckptguard.model import CheckpointFacts, Evidence, Finding
from ckptguard.ports import Store, Subject
from ckptguard.validators._values import numbers

NUMBERS = 64 << 10
MOST_REMOTE = 32
APART = 1e-3  # of the norm: rounding is far below, what no longer is one tensor far above


class ReplicasAlike:
    """Whether tensors that all model-parallel ranks hold are the same in every rank's file.

    Finds: norms and biases that drifted apart between tensor-parallel ranks.
    Why it matters: each rank computes with its own copy; after a resume the differences grow until the loss explodes.
    Example: gradients of layer norms that were never reduced over the tensor-parallel ranks.
    What to do: find the missing reduction; resume from a checkpoint in which the copies agree.
    Blind spots: copies of which a framework saves only one; differences below a thousandth.
    """

    name = "replicas-alike"
    needs = Evidence.CONTENT
    codes = ("rank-divergence",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        store = subject.store
        if store is None:
            return
        known: tuple[Replicas, ...] = subject.facts.state.attributes.get(REPLICAS, ())
        odd = [r for r in known if len({t.facts.digest for _, t in r.copies if t.facts is not None}) > 1]
        if store.traits.request_bytes:
            odd = odd[:MOST_REMOTE]
        worst: dict[str, tuple[float, str, str, int]] = {}
        for replicas in odd:
            first = replicas.copies[0][0]
            for file, apart in apart_in(store, subject.facts, replicas):
                distance, _, _, count = worst.get(file, (0.0, "", "", 0))
                if apart > APART:
                    worst[file] = (max(apart, distance), replicas.name, first, count + 1)
        for file, (distance, name, first, count) in worst.items():
            yield finding(
                "rank-divergence",
                f"{file}:{name}",
                f"{count} tensors that all ranks hold alike differ between {file} and {first} ({name} is one), by {distance:.2g} of their size at most",
            )


def apart_in(store: Store, facts: CheckpointFacts, replicas: Replicas) -> Iterator[tuple[str, float]]:
    """How far each file's copy is from the first file's, relative to its norm."""
    (_, first), *rest = replicas.copies
    wanted = numbers(store, facts, first, 0, NUMBERS)
    for file, tensor in rest:
        found = numbers(store, facts, tensor, 0, NUMBERS)
        if wanted is None or found is None or found.shape != wanted.shape:
            continue
        size = float(np.linalg.norm(wanted))
        distance = float(np.linalg.norm(found - wanted))
        if np.isfinite(distance) and size:
            yield file, distance / size


CHECK = ReplicasAlike()

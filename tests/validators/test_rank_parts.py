"""Which ranks' numbers are another rank's, and which copies of a set are none."""

from __future__ import annotations

import numpy as np

from ckptguard.layouts._deepspeed_zero import _short
from ckptguard.layouts._ranks import RankPart
from ckptguard.model import Tensor, TensorFacts
from ckptguard.validators.rank_parts import copies, moved


def parts(rng: np.random.Generator, ranks: int = 4) -> dict[int, np.ndarray]:
    return {rank: rng.normal(size=256) for rank in range(ranks)}


def test_ranks_that_changed_places_are_told_from_ranks_that_moved() -> None:
    rng = np.random.default_rng(0)
    then = parts(rng)
    now = {rank: values + rng.normal(scale=0.02, size=values.size) for rank, values in then.items()}
    assert moved(now, then) == {}
    assert moved({**now, 1: now[2], 2: now[1]}, then) == {1: 2, 2: 1}
    assert moved({**now, 3: now[0]}, then) == {3: 0}


def test_another_training_and_padding_that_was_never_filled_are_no_other_ranks() -> None:
    rng = np.random.default_rng(1)
    then = parts(rng)
    assert moved(parts(rng), then) == {}
    now = {rank: values.copy() for rank, values in then.items()}
    now[3][-20:] = 1e30
    assert moved(now, then) == {}


def part(rank: int, digest: str, low: float = -1.0) -> RankPart:
    facts = TensorFacts(digest, 400, minimum=low, maximum=1.0)
    return RankPart("the weights", rank, f"rank_{rank}", (Tensor("flat", "float32", (100,), facts=facts),))


def test_a_copy_is_one_and_sets_of_replicas_or_constants_are_none() -> None:
    assert copies([part(0, "a"), part(1, "b"), part(2, "c")]) == []
    assert [(x.rank, y.rank) for x, y in copies([part(0, "a"), part(1, "a")])] == [(1, 0)]
    assert [(x.rank, y.rank) for x, y in copies([part(0, "a"), part(1, "b"), part(2, "b")])] == [(2, 1)]
    assert copies([part(0, "a"), part(1, "b"), part(2, "a"), part(3, "b")]) == []
    assert copies([part(0, "a", 1.0), part(1, "a", 1.0)]) == []


def test_the_room_that_equal_shares_leave_empty() -> None:
    """5 numbers on 2 ranks are 3 and 2; of 1 the last rank has nothing."""
    assert _short([5, 4, 1], 0, 2, [5, 1]) == {}
    assert _short([5, 4, 1], 1, 2, [5, 1]) == {0: [(2, 1)], 1: [(0, 1)]}
    assert _short([5, 4, 1], 1, 2, [4, 2]) == {}

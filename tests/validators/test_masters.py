"""Which differences between masters and weights rounding explains, and which stretches of large tensors are compared."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.validators.masters import PIECE, _gap, _sample
from ckptguard.values import as_floats

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_no_difference_and_more_is_one(dtype: str) -> None:
    torch.manual_seed(0)
    masters = torch.randn(4096) * torch.logspace(-6, 3, 4096)
    rounded = masters.to(getattr(torch, dtype))
    weights = as_floats(rounded.view(torch.uint16).numpy(), dtype)
    assert not _gap(masters.numpy(), weights, dtype).any()
    moved = (masters * 1.05).numpy()
    assert np.count_nonzero(_gap(moved, weights, dtype)) > 3900


def test_single_precision_must_be_equal_and_nan_is_not_compared() -> None:
    a, b = np.float32([1, 2, np.nan, np.inf]), np.float32([1, 2.0000002, 3, np.inf])
    assert _gap(a, b, "float32").astype(bool).tolist() == [False, True, False, False]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3 * PIECE), st.floats(1e-6, 1.0))
def test_stretches_lie_inside_and_do_not_overlap(numel: int, share: float) -> None:
    stretches = list(_sample(numel, share))
    assert stretches[0][0] == 0
    assert all(length > 0 and at + length <= numel for at, length in stretches)
    assert all(a + length <= b for (a, length), (b, _) in itertools.pairwise(stretches))
    covered = sum(length for _, length in stretches)
    assert covered == numel if share >= 1.0 else covered <= max(2 * share * numel, 4096 + 1)

"""Which tensors moved: the digests of tensors that were cut otherwise say nothing."""

from __future__ import annotations

from ckptguard.model import Tensor, TensorFacts
from ckptguard.validators.weight_history import _differs


def tensor(digest: str, norm: float = 2.0, low: float = -1.0) -> Tensor:
    return Tensor("w", "float32", (4,), facts=TensorFacts(digest, 16, minimum=low, maximum=1.0, norm=norm))


def test_other_chunks_are_no_other_numbers() -> None:
    assert not _differs((tensor("a"), tensor("a")))
    assert not _differs((tensor("a"), tensor("b", norm=2.0 + 1e-9)))
    assert _differs((tensor("a"), tensor("b", norm=2.001)))
    assert _differs((tensor("a"), tensor("b", low=-1.1)))

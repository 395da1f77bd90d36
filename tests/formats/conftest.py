"""What the tests of the readers share: open a file as the product does, and compare with what torch says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptguard.formats import Parsed, load_array, parse
from ckptguard.model import Tensor
from ckptguard.storage.local import LocalStore


@pytest.fixture
def open_file() -> Callable[..., Parsed]:
    """`open_file(path, format="torch")`: the structure of a file, read by the product's reader."""

    def opened(path: Path, format: str = "torch") -> Parsed:
        return parse(LocalStore(path.parent), path.name, path.stat().st_size, format)

    return opened


@pytest.fixture
def array_of() -> Callable[[Path, Tensor], np.ndarray]:
    """One tensor's numbers, read lazily."""

    def read(path: Path, tensor: Tensor) -> np.ndarray:
        return load_array(LocalStore(path.parent), path.name, path.stat().st_size, tensor)

    return read


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    elif isinstance(value, list | tuple):
        for i, child in enumerate(value):
            yield from _leaves(child, (*path, i))
    else:
        yield ".".join(str(p) for p in path), value


@pytest.fixture
def same_as_torch(
    open_file: Callable[..., Parsed], array_of: Callable[[Path, Tensor], np.ndarray]
) -> Callable[[Path], Parsed]:
    """Assert that names, shapes, dtypes and numbers of all tensors are those that torch.load gives; return the structure."""

    def check(path: Path) -> Parsed:
        import torch

        parsed = open_file(path)
        assert parsed.problems == ()
        expected = {
            n: v for n, v in _leaves(torch.load(path, weights_only=False)) if isinstance(v, torch.Tensor)
        }
        found = dict(_leaves(parsed.tree))
        assert {n for n, v in found.items() if isinstance(v, Tensor)} == expected.keys()
        for name, tensor in expected.items():
            ours = found[name]
            assert (ours.dtype, ours.shape) == (
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
            ), name
            if tensor.device.type == "meta":
                assert ours.start is None
                continue
            numbers = tensor.detach()
            if tensor.is_quantized:
                numbers = tensor.int_repr()
            elif tensor.is_floating_point() and tensor.dtype not in (
                torch.float64,
                torch.float32,
                torch.float16,
            ):
                numbers = numbers.float()
            np.testing.assert_array_equal(
                array_of(path, ours), numbers.resolve_conj().resolve_neg().numpy(), err_msg=name
            )
        return parsed

    return check

"""numpy's arrays, scalars and dtypes as pickles make them, step by step, built from plain bytes only."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptguard.formats._inert import Opaque


class PickledDtype:
    """numpy.dtype(...) while its state is still to come."""

    def __init__(self, text: Any = "V", *_: Any) -> None:
        self.dtype = np.dtype(np.void)
        if isinstance(text, bytes):
            text = text.decode("ascii")
        if isinstance(text, str) and len(text) < 64 and "O" not in text.upper():
            self.dtype = np.dtype(text)
        self.order = "="

    def set_pickled_state(self, state: Any) -> PickledDtype:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else "="
        order = order.decode("ascii") if isinstance(order, bytes) else order
        if order == ">":
            self.dtype = self.dtype.newbyteorder(">")
        return self


class PickledArray:
    """numpy.ndarray under reconstruction; becomes the array when its state arrives."""

    def set_pickled_state(self, state: Any) -> Any:
        _, shape, dtype, fortran, raw = state
        if isinstance(raw, str):
            raw = raw.encode("latin-1")
        if not isinstance(dtype, PickledDtype) or not isinstance(raw, bytes | bytearray):
            return Opaque("numpy.ndarray", (), {"shape": shape})
        flat = np.frombuffer(bytes(raw), dtype.dtype)
        return flat.reshape(shape, order="F" if fortran else "C")


def frombuffer(raw: Any, dtype: Any, shape: Any, order: Any = "C") -> Any:
    """numpy's protocol-5 form: the bytes lie in the pickle itself."""
    if (
        not isinstance(dtype, PickledDtype)
        or not isinstance(raw, bytes | bytearray)
        or order not in ("C", "F")
    ):
        return Opaque("numpy.ndarray", (), {"shape": shape})
    return np.frombuffer(bytes(raw), dtype.dtype).reshape(shape, order=order)


def numpy_scalar(dtype: Any, raw: Any = b"") -> Any:
    if isinstance(raw, str):
        raw = raw.encode("latin-1")
    return (
        np.frombuffer(raw, dtype.dtype)[0].item()
        if isinstance(raw, bytes) and raw
        else Opaque("numpy.scalar")
    )

"""What an element's bits mean, for every dtype that checkpoints hold, and statistics of the values in a buffer."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

MAX_DIMENSIONS = 64  # numpy's limit; torch writes no more either
PAGE = 4096  # what file systems and disks lose at once

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Bits:
    """How a dtype's bits are laid out: width in bytes, and for floating point the bit pattern of infinity."""

    width: int
    kind: (
        str  # f: sign and magnitude, i: two's complement, u: unsigned, b: bool, c: complex, x: nothing known
    )
    infinity: int = 0  # bit pattern of +inf (0: the type has none)
    nans: tuple[int, ...] = ()  # for types without infinity: the patterns, sign removed, that are NaN


DTYPES: dict[str, Bits] = {
    "float64": Bits(8, "f", 0x7FF0000000000000),
    "float32": Bits(4, "f", 0x7F800000),
    "float16": Bits(2, "f", 0x7C00),
    "bfloat16": Bits(2, "f", 0x7F80),
    "float8_e5m2": Bits(1, "f", 0x7C),
    "float8_e4m3fn": Bits(1, "f", 0, (0x7F,)),
    "float8_e4m3fnuz": Bits(1, "x"),
    "float8_e5m2fnuz": Bits(1, "x"),
    "float8_e8m0fnu": Bits(1, "x"),
    "float4_e2m1fn_x2": Bits(1, "x"),
    "int64": Bits(8, "i"),
    "int32": Bits(4, "i"),
    "int16": Bits(2, "i"),
    "int8": Bits(1, "i"),
    "uint64": Bits(8, "u"),
    "uint32": Bits(4, "u"),
    "uint16": Bits(2, "u"),
    "uint8": Bits(1, "u"),
    "bool": Bits(1, "b"),
    "complex64": Bits(8, "c"),
    "complex128": Bits(16, "c"),
    "complex32": Bits(4, "x"),
    "qint8": Bits(1, "i"),
    "quint8": Bits(1, "u"),
    "qint32": Bits(4, "i"),
}

_NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def itemsize(dtype: str) -> int:
    """Bytes of one element, 0 for a dtype that is not known."""
    bits = DTYPES.get(dtype)
    return bits.width if bits else 0


@dataclass(frozen=True, slots=True)
class Values:
    """Statistics of a run of elements; `+` joins two of them. `squares` is the sum of squares of the finite ones."""

    nan: int = 0
    inf: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    squares: float = 0.0
    zero_pages: int = 0

    def __add__(self, other: Values) -> Values:
        return Values(
            self.nan + other.nan,
            self.inf + other.inf,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
            self.squares + other.squares,
            self.zero_pages + other.zero_pages,
        )


def as_floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers of a flat array of raw elements (unsigned integers of the dtype's width) as floating point."""
    if dtype in _NUMPY:
        return raw.view(_NUMPY[dtype])
    if dtype == "bfloat16":
        wide = np.empty(raw.size, np.uint32)
        np.left_shift(raw, 16, out=wide, dtype=np.uint32, casting="unsafe")
        return wide.view(np.float32)
    numbers: np.ndarray = _float8_table(dtype)[raw]
    return numbers


_TABLES: dict[str, np.ndarray] = {}


def _float8_table(dtype: str) -> np.ndarray:
    """All 256 values of an eight-bit float, by the bit layout of its name (OCP FP8, and the FNUZ variants)."""
    table = _TABLES.get(dtype)
    if table is None:
        exponent_bits = int(dtype[8])
        mantissa_bits = 7 - exponent_bits
        fnuz = dtype.endswith("fnuz")
        bias = (1 << (exponent_bits - 1)) - (0 if fnuz else 1)
        values = []
        for code in range(256):
            sign = -1.0 if code & 0x80 else 1.0
            exponent = (code & 0x7F) >> mantissa_bits
            mantissa = code & ((1 << mantissa_bits) - 1)
            top = (1 << exponent_bits) - 1
            if fnuz:
                special = code == 0x80
                infinite = False
            elif dtype.endswith("fn"):
                special = (code & 0x7F) == 0x7F
                infinite = False
            else:
                special = exponent == top and mantissa != 0
                infinite = exponent == top and mantissa == 0
            if special:
                values.append(math.nan)
            elif infinite:
                values.append(sign * math.inf)
            elif exponent == 0:
                values.append(sign * math.ldexp(mantissa, 1 - bias - mantissa_bits))
            else:
                values.append(
                    sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
                )
        table = np.array(values, np.float32)
        _TABLES[dtype] = table
    return table


def values_of(buffer: Buffer, dtype: str) -> Values:
    """Statistics of a buffer of whole elements. Unknown dtypes give empty statistics."""
    bits = DTYPES.get(dtype)
    if bits is None or bits.kind == "x" or not len(buffer):
        return Values()
    if bits.kind == "c":
        half = "float32" if bits.width == 8 else "float64"
        return values_of(buffer, half)
    raw = np.frombuffer(buffer, _UNSIGNED[bits.width])
    if bits.kind != "f":
        numbers = raw.view(_SIGNED[bits.width]) if bits.kind == "i" else raw
        return Values(minimum=float(numbers.min()), maximum=float(numbers.max()))
    with np.errstate(over="ignore", invalid="ignore"):
        return _float_values(raw, dtype, bits)


def _float_values(raw: np.ndarray, dtype: str, bits: Bits) -> Values:
    if dtype in _NUMPY and dtype not in _MINIFLOATS:
        numbers = raw.view(_NUMPY[dtype])
        squares = _square(numbers)
        # Without NaN and infinity, which a finite sum excludes, the processor's own order is the right one.
        if not math.isfinite(squares):
            return _float_values_slowly(raw, dtype)
        return Values(0, 0, float(np.minimum.reduce(numbers)), float(np.maximum.reduce(numbers)), squares)
    low, high = _extremes(raw, bits)
    below = (1 << (8 * bits.width - 1)) - 1
    if max(low & below, high & below) >= (bits.infinity or min(bits.nans)):
        return _float_values_slowly(raw, dtype)
    ends = as_floats(np.array([low, high], raw.dtype), dtype)
    squares = sum(map(_square, _bfloat16(raw) if dtype == "bfloat16" else _magnitudes(raw, dtype)))
    return Values(0, 0, float(ends[0]), float(ends[1]), squares)


def _extremes(raw: np.ndarray, bits: Bits) -> tuple[int, int]:
    """Bit patterns of the least and the greatest of sign-and-magnitude numbers, by integer comparison, which vectorises
    at memory speed. NaN and infinity come out as the extremes that they are in that order."""
    sign = 1 << (8 * bits.width - 1)
    largest = int(np.maximum.reduce(raw))
    if largest < sign:  # no negative one
        return int(np.minimum.reduce(raw)), largest
    greatest = int(np.maximum.reduce(raw.view(_SIGNED[bits.width])))
    return largest, greatest if greatest >= 0 else int(np.minimum.reduce(raw))


def _square(numbers: np.ndarray) -> float:
    squares = float(np.dot(numbers, numbers))
    if math.isinf(squares):  # perhaps only too large for the type's own sum
        wide = numbers.astype(np.float64)
        squares = float(np.dot(wide, wide))
    return squares


def _float_values_slowly(raw: np.ndarray, dtype: str) -> Values:
    return _all_values(as_floats(raw, dtype).astype(np.float64))


# Formats that no processor converts fast: bits below the sign, bits of the mantissa, exponent bias.
_MINIFLOATS = {"float16": (0x7FFF, 10, 15), "float8_e5m2": (0x7F, 2, 15), "float8_e4m3fn": (0x7F, 3, 7)}

# Elements converted at a time, so that the converted ones do not leave the processor's cache.
_CONVERTED = 1 << 18
_local = threading.local()


def _scratch(count: int) -> np.ndarray:
    """Room for 32-bit words, this thread's own: memory fresh from the system costs more than what is done in it."""
    if not hasattr(_local, "scratch"):
        _local.scratch = np.empty(_CONVERTED, np.uint32)
    room: np.ndarray = _local.scratch[:count]
    return room


def _bfloat16(raw: np.ndarray) -> Iterator[np.ndarray]:
    """The numbers as float32, in some order: those of a pair of words in two steps that vectorise. Each array is valid
    until the next one is asked for."""
    words = raw[: raw.size // 2 * 2].view(np.uint32)
    for at in range(0, words.size, _CONVERTED):
        some = words[at : at + _CONVERTED]
        bits = _scratch(some.size)
        np.left_shift(some, 16, out=bits)
        yield bits.view(np.float32)
        np.bitwise_and(some, 0xFFFF0000, out=bits)
        yield bits.view(np.float32)
    if raw.size % 2:
        yield as_floats(raw[-1:], "bfloat16")


def _magnitudes(raw: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
    """Absolute values of finite numbers as float32: their bits moved to where float32 has them, then scaled. Exact.
    Each array is valid until the next one is asked for."""
    below, mantissa, bias = _MINIFLOATS[dtype]
    for at in range(0, raw.size, _CONVERTED):
        some = raw[at : at + _CONVERTED]
        bits = _scratch(some.size)
        np.bitwise_and(some, below, out=bits, dtype=np.uint32, casting="unsafe")
        np.left_shift(bits, 23 - mantissa, out=bits)
        numbers = bits.view(np.float32)
        np.multiply(numbers, np.float32(2.0 ** (127 - bias)), out=numbers)
        yield numbers


def _all_values(numbers: np.ndarray) -> Values:
    nan = int(np.isnan(numbers).sum())
    inf = int(np.isinf(numbers).sum())
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return Values(nan, inf)
    return Values(nan, inf, float(finite.min()), float(finite.max()), float(np.dot(finite, finite)))


def zero_pages(buffer: Buffer) -> int:
    """How many whole pages of a tensor, counted from its first byte, hold nothing but zero bytes."""
    whole = len(buffer) // PAGE
    if not whole:
        return 0
    words = np.frombuffer(buffer, np.uint8, whole * PAGE).view(np.uint64).reshape(whole, PAGE // 8)
    return int(np.count_nonzero(np.bitwise_or.reduce(words, axis=1) == 0))

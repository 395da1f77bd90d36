"""Hash and CRC over buffers, piece by piece.

A tensor's digest is XXH3-128 over its bytes, or, where it is longer than one piece (1 MiB), over the concatenated
digests of its pieces: equal bytes give equal digests wherever they lie, and pieces can be hashed in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import xxhash
from isal import isal_zlib

from ckptguard.model import TensorFacts
from ckptguard.values import DTYPES, Buffer, Values, values_of

PIECE = 1 << 20
BLOCK = 8 << 20


# --- digests ------------------------------------------------------------------------------------------


def piece_digest(buffer: Buffer) -> bytes:
    return xxhash.xxh3_128_digest(buffer)


def join_pieces(digests: Iterable[bytes]) -> str:
    """The tensor digest from the digests of its pieces, in order."""
    pieces = list(digests)
    if not pieces:
        return xxhash.xxh3_128_hexdigest(b"")
    return pieces[0].hex() if len(pieces) == 1 else xxhash.xxh3_128_hexdigest(b"".join(pieces))


def tensor_digest(buffer: Buffer | np.ndarray) -> str:
    """The digest of a tensor's bytes, in memory order. Accepts any contiguous buffer."""
    view = _bytes_of(buffer)
    return join_pieces(piece_digest(view[at : at + PIECE]) for at in range(0, len(view), PIECE))


def tensor_facts(buffer: Buffer | np.ndarray, dtype: str) -> TensorFacts:
    """Digest and statistics of a whole tensor in memory."""
    view = _bytes_of(buffer)
    total = Values()
    digests = []
    for at in range(0, len(view), PIECE):
        piece = view[at : at + PIECE]
        digests.append(piece_digest(piece))
        total += values_of(piece, dtype)
    return facts_from(join_pieces(digests), len(view), dtype, total)


def facts_from(digest: str, nbytes: int, dtype: str, values: Values) -> TensorFacts:
    bits = DTYPES.get(dtype)
    known = values.minimum <= values.maximum
    has_norm = bits is not None and bits.kind in "fc" and nbytes > 0
    return TensorFacts(
        digest=digest,
        nbytes=nbytes,
        nan=values.nan,
        inf=values.inf,
        minimum=values.minimum if known else None,
        maximum=values.maximum if known else None,
        norm=math.sqrt(values.squares) if has_norm else None,
        zero_pages=values.zero_pages,
        zeros=known and values.minimum == 0 == values.maximum and not values.nan and not values.inf,
    )


def _bytes_of(buffer: Buffer | np.ndarray) -> memoryview:
    if isinstance(buffer, np.ndarray):
        buffer = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
    view = memoryview(buffer)  # type: ignore[arg-type]
    return view if not view.nbytes else view.cast("B")


def block_digests(read: Callable[[int, int], Buffer], size: int, block_size: int = BLOCK) -> tuple[str, ...]:
    """XXH3-128 of each block of a file; `read(start, length)` gives its bytes."""
    digests = []
    for start in range(0, size, block_size):
        end = min(size, start + block_size)
        hasher = xxhash.xxh3_128()
        for at in range(start, end, PIECE):
            hasher.update(read(at, min(PIECE, end - at)))
        digests.append(hasher.hexdigest())
    return tuple(digests)


def blocks_digest(blocks: Iterable[str]) -> str:
    """One digest over a file's list of block digests."""
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(b) for b in blocks))


# --- CRC-32 -------------------------------------------------------------------------------------------


def crc32(buffer: Buffer, start: int = 0) -> int:
    return isal_zlib.crc32(buffer, start)


def _times(matrix: list[int], vector: int) -> int:
    total, row = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[row]
        vector >>= 1
        row += 1
    return total


def _squares() -> list[list[int]]:
    """Matrices over GF(2) that advance a CRC-32 by 2**n zero bytes, n = 0, 1, 2, ..."""
    one_bit = [0xEDB88320] + [1 << n for n in range(31)]
    matrix = one_bit
    for _ in range(3):  # one bit -> one byte
        matrix = [_times(matrix, row) for row in matrix]
    result = []
    for _ in range(64):
        result.append(matrix)
        matrix = [_times(matrix, row) for row in matrix]
    return result


_ADVANCE = _squares()


def crc32_join(first: int, second: int, second_length: int) -> int:
    """The CRC-32 of two runs of bytes, from the CRC of each and the length of the second."""
    power = 0
    while second_length:
        if second_length & 1:
            first = _times(_ADVANCE[power], first)
        second_length >>= 1
        power += 1
    return first ^ second

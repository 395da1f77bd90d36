"""One fuzz target a reader: any bytes at all raise FormatError or nothing, within bounds.

Run by hand with coverage guidance, where atheris is installed: `python tests/fuzz/targets.py safetensors -max_total_time=60`.
What it finds is kept under tests/fuzz/cases/TARGET/ and runs with the tests from then on.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path

from ckptguard import scan
from ckptguard.errors import FormatError
from ckptguard.facts import plan_scan
from ckptguard.formats import READERS, Parsed, sniff
from ckptguard.formats._base import load_array
from ckptguard.formats._nested import Held
from ckptguard.formats.pickles import read_pickle, walk

CASES = Path(__file__).parent / "cases"


def read_all(data: bytes, parsed: Parsed) -> None:
    """What an audit does with a file that opened: its content once, and every tensor."""
    held = Held(data)
    scanned = scan.scan(io.BytesIO(data).readinto, plan_scan(parsed, len(data), 0))
    if parsed.verify is not None:
        list(parsed.verify(scanned.gaps))
    for tensor in parsed.tensors:
        with contextlib.suppress(FormatError):
            load_array(held, tensor)


def reader(name: str) -> Callable[[bytes], None]:
    def target(data: bytes) -> None:
        with contextlib.suppress(FormatError):
            read_all(data, READERS[name](Held(data)))

    return target


def pickles(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        for _ in walk(read_pickle(data).value):
            pass


def beginnings(data: bytes) -> None:
    sniff(data[:512])


TARGETS: dict[str, Callable[[bytes], None]] = {
    **{name: reader(name) for name in READERS},
    "pickles": pickles,
    "beginnings": beginnings,
}


def main() -> None:
    import atheris

    name = sys.argv.pop(1)
    corpus = CASES / name
    corpus.mkdir(parents=True, exist_ok=True)
    atheris.instrument_all()
    atheris.Setup([*sys.argv, str(corpus)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()

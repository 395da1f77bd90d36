"""A file that is one pickle and nothing else."""

from __future__ import annotations

from ckptguard.errors import FormatError
from ckptguard.formats._base import Parsed, Source, name_tensors
from ckptguard.formats.pickles import read_pickle
from ckptguard.model import Problem

MAX_PICKLE = 1 << 30


def read(source: Source) -> Parsed:
    """Read a bare pickle without executing it. Raises FormatError, StoreError."""
    if source.size > MAX_PICKLE:
        raise FormatError("bad-header", f"{source.size} bytes are too many for a bare pickle")
    data = source.read(0, source.size)
    pickled = read_pickle(data)
    problems = []
    if pickled.end != len(data):
        # A loader reads the first pickle only; a second one behind it is how payloads hide from scanners.
        problems.append(Problem("bad-header", "", f"the pickle ends at byte {pickled.end} of {len(data)}"))
    return Parsed("pickle", pickled.value, name_tensors(pickled.value), pickled.globals, tuple(problems))

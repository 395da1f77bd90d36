"""What the next draws of every random generator would be, found out without disturbing any of them.

Draws are compared instead of states: they are short, readable, and tell whether a restored generator really continues
the stream, whatever form its state was saved in.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

DRAWS = 4
Draws = dict[str, tuple[str, ...]]


def next_draws(generators: Mapping[str, Any] | None = None) -> Draws:
    """The next draws of python, numpy, torch and each initialised CUDA device, as hexadecimal words.

    `generators` are further torch generators, numpy generators or `random.Random` objects (a loader's own), by name.
    Only what the process has loaded already is looked at. The draws are made by copies; drawing on a device waits for
    that device, so this is for saves, not for steps.
    """
    draws: Draws = {"python": _python(random)}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        copy = numpy.random.RandomState()
        copy.set_state(numpy.random.get_state())
        draws["numpy"] = _words(copy.randint(0, 2**32, DRAWS, dtype=numpy.uint64))
    torch = sys.modules.get("torch")
    if torch is not None:
        draws["torch"] = _torch(torch, torch.default_generator)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            for index in range(torch.cuda.device_count()):
                draws[f"cuda:{index}"] = _torch(torch, torch.cuda.default_generators[index])
    for name, generator in (generators or {}).items():
        draws[name] = _any(generator)
    return draws


def _any(generator: Any) -> tuple[str, ...]:
    if hasattr(generator, "getrandbits"):
        return _python(generator)
    if hasattr(generator, "bit_generator"):
        numpy = sys.modules["numpy"]
        bits = type(generator.bit_generator)()
        bits.state = generator.bit_generator.state
        return _words(numpy.random.Generator(bits).integers(0, 2**32, DRAWS, dtype=numpy.uint64))
    return _torch(sys.modules["torch"], generator)


def _python(source: Any) -> tuple[str, ...]:
    copy = random.Random()
    copy.setstate(source.getstate())
    return _words(copy.getrandbits(32) for _ in range(DRAWS))


def _torch(torch: Any, generator: Any) -> tuple[str, ...]:
    # Not clone_state(): on CUDA it registers with graphs that are being captured.
    copy = torch.Generator(device=generator.device)
    copy.set_state(generator.get_state())
    numbers = torch.randint(0, 2**32, (DRAWS,), generator=copy, device=generator.device, dtype=torch.int64)
    return _words(numbers.tolist())


def _words(numbers: Any) -> tuple[str, ...]:
    return tuple(f"{int(number):08x}" for number in numbers)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """After the block every random generator is what it was before."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    on_cuda = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch_state = torch.get_rng_state() if torch is not None else None
    cuda_states = torch.cuda.get_rng_state_all() if torch is not None and on_cuda else None
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)
            if cuda_states is not None:
                torch.cuda.set_rng_state_all(cuda_states)

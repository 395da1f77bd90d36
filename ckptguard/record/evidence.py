"""What is known in memory at the moment of a save, and the draft of the seal that it makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckptguard.record.environment import environment, versions
from ckptguard.record.guard import Once
from ckptguard.record.probe import run_probe
from ckptguard.record.rng import Draws, next_draws
from ckptguard.record.tensors import sealed_tensors
from ckptguard.seals import Probe, Seal, SealedTensor


@dataclass(frozen=True, slots=True)
class Evidence:
    """`seconds` is what it took to look."""

    rng: Draws = field(default_factory=dict)
    tensors: Mapping[str, SealedTensor] = field(default_factory=lambda: MappingProxyType({}))
    probe: float | None = None
    seconds: float = 0.0


class Witness:
    """Looks at the training's objects at each save, and changes nothing of them."""

    def __init__(
        self,
        parts: Mapping[str, Any],
        generators: Mapping[str, Any],
        probe: Callable[[], Any] | None,
        *,
        tensors: bool,
    ) -> None:
        self._parts, self._generators, self._probe, self._with_tensors = parts, generators, probe, tensors
        self._try_probe, self._try_tensors = Once("the probe"), Once("digests of tensors in memory")

    def look(self) -> Evidence:
        began = time.perf_counter()
        rng = next_draws(self._generators)
        tensors = self._try_tensors(lambda: sealed_tensors(self._parts)) if self._with_tensors else None
        probe, loss = self._probe, None
        if probe is not None:
            modules = [part for part in self._parts.values() if hasattr(part, "named_modules")]
            loss = self._try_probe(lambda: run_probe(probe, modules))
        return Evidence(rng, tensors or {}, loss, time.perf_counter() - began)


def draft_seal(
    evidence: Evidence, *, parts: Mapping[str, Any], rank: int, world_size: int, **known: Any
) -> Seal:
    """The seal of a save but for its files. `known` are fields of the seal: checkpoint, step, attempt, ..."""
    return Seal(
        sealed_by="recorder",
        created=time.time(),
        tensors=evidence.tensors,
        tensors_from="memory",
        components={name: True for name, part in parts.items() if part is not None},
        topology={"world_size": world_size},
        versions=versions(),
        environment=environment(),
        rng={str(rank): evidence.rng},
        probe=None if evidence.probe is None else Probe(loss=evidence.probe),
        ranks=(rank,),
        **known,
    )

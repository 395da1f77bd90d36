from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Effect, Evidence, Finding, Role, Severity
from ckptguard.ports import Subject


class Topology:
    """Whether the parallel layout that a checkpoint records is the one that its parts have.

    Finds: arguments whose sizes do not multiply to the world size, grids of model-parallel ranks and of generator states
    of another shape than the arguments say, fewer loader or generator states than ranks.
    Why it matters: ranks without a state of their own start their data or their random numbers afresh, or the load fails
    after the job has waited for its nodes.
    Example: eight loader states for a run that recorded sixteen data-parallel ranks.
    What to do: resume from a checkpoint whose parts are complete.
    Blind spots: formats that record no sizes (plain DCP saves without a world size in their train state).
    """

    name = "topology"
    needs = Evidence.STRUCTURE
    codes = ("topology-mismatch", "missing-rank")

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        yield from _product(facts, facts.state.topology)
        yield from _grid(facts, facts.state.topology)
        yield from _generators(facts, facts.state.topology)
        yield from _loaders(facts, facts.state.topology)


def _product(facts: CheckpointFacts, topology: Mapping[str, Any]) -> Iterator[Finding]:
    sizes = {name: topology[name] for name in ("tp", "pp", "cp", "dp") if isinstance(topology.get(name), int)}
    world = topology.get("world_size")
    # Without a recorded data-parallel size the product only has to divide the world.
    if not isinstance(world, int) or not {"tp", "pp"} <= sizes.keys():
        return
    made = prod(sizes.values())
    if made and (world == made or ("dp" not in sizes and world % made == 0)):
        return
    words = " x ".join(f"{name} {size}" for name, size in sizes.items())
    yield finding(
        "topology-mismatch",
        facts.path,
        f"{facts.path} records a world of {world} ranks, and {words} make {made}",
    )


def _grid(facts: CheckpointFacts, topology: Mapping[str, Any]) -> Iterator[Finding]:
    """The rank folders of Megatron's legacy format: pipeline and expert numbers are there only where there are several."""
    grid = facts.state.attributes.get("rank_grid")
    sizes = [topology.get(name) for name in ("tp", "pp", "ep")]
    if not grid or facts.manifest.absences or not all(isinstance(n, int) for n in sizes[:2]):
        return
    wanted = (sizes[0], *(n for n in sizes[1:] if isinstance(n, int) and n > 1))
    if tuple(grid) != wanted:
        yield finding(
            "topology-mismatch",
            facts.path,
            f"the arguments say {' x '.join(map(str, wanted))} model-parallel ranks, the folders are those of {' x '.join(map(str, grid))}",
        )


def _generators(facts: CheckpointFacts, topology: Mapping[str, Any]) -> Iterator[Finding]:
    parts = facts.state.attributes.get("rng_parts")
    if parts and isinstance(topology.get("tp"), int) and isinstance(topology.get("pp"), int):
        shape = tuple(int(n) for n in parts[0].split("."))
        if shape[:2] != (topology["pp"], topology["tp"]) and len(shape) >= 2:
            yield finding(
                "topology-mismatch",
                facts.path,
                f"the generator states are of {shape[0]} pipeline and {shape[1]} tensor parallel ranks, the arguments say {topology['pp']} and {topology['tp']}",
                severity=Severity.WARNING,
                effect=Effect.LOSSY,
            )
    ranks = {r.rank for r in facts.state.rngs if r.rank is not None}
    world = topology.get("world_size")
    if parts or not ranks or not isinstance(world, int) or facts.manifest.by_role(Role.RNG):
        return  # files of their own are counted with the ranks' files
    if len(facts.state.rngs) == len(ranks) < world and len(ranks) > 1:
        yield _lost("random-generator state", facts, len(ranks), world)


def _loaders(facts: CheckpointFacts, topology: Mapping[str, Any]) -> Iterator[Finding]:
    ranks = {x.rank for x in facts.state.loaders if x.rank is not None}
    size = topology.get("dp")
    if not ranks or not isinstance(size, int) or facts.manifest.by_role(Role.DATALOADER):
        return
    if len(ranks) < size or max(ranks) >= size:
        yield _lost("data position", facts, len(ranks), size)


def _lost(what: str, facts: CheckpointFacts, found: int, wanted: int) -> Finding:
    return finding(
        "topology-mismatch",
        facts.path,
        f"{facts.path} holds the {what} of {found} ranks and records {wanted}",
        severity=Severity.WARNING,
        effect=Effect.LOSSY,
    )


CHECK = Topology()

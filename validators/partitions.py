from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.layouts._ranks import PARTITIONS, Partition
from ckptguard.model import Evidence, Finding
from ckptguard.ports import Subject


class Partitions:
    """Whether the ranks' parts of flattened parameters add up.

    Finds: partitions that together are larger or smaller than the model, parts of unequal size where all must be equal,
    and moments that do not fit their master weights.
    Why it matters: flat partitions carry no names; one of a wrong size shifts every parameter behind it.
    Example: one rank's file replaced by that of a run with another world size.
    What to do: take the file from a replica, or resume from the checkpoint before.
    Blind spots: groups of experts, whose record is not kept by rank; parts that were swapped between ranks have equal sizes.
    """

    name = "partitions"
    needs = Evidence.STRUCTURE
    codes = ("shape-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        for partition in subject.facts.state.attributes.get(PARTITIONS, ()):
            yield from self._moments(partition)
            yield from self._sum(partition)

    @staticmethod
    def _moments(partition: Partition) -> Iterator[Finding]:
        for part in partition.parts:
            # Some releases save the padding with the masters too: then there is nothing to add.
            fitting = (part.numel + part.padding, part.numel)
            for numel in part.moments:
                if numel not in fitting:
                    yield finding(
                        "shape-mismatch",
                        part.subject,
                        f"rank {part.rank} has {part.numel} master weights of {partition.name}, padded by {part.padding}, and moments of {numel}",
                    )
                    break

    @staticmethod
    def _sum(partition: Partition) -> Iterator[Finding]:
        parts = partition.parts
        if partition.equal and len({p.numel for p in parts}) > 1:
            sizes = sorted({p.numel for p in parts})
            usual = max(sizes, key=lambda s: sum(p.numel == s for p in parts))
            odd = next(p for p in parts if p.numel != usual)
            yield finding(
                "shape-mismatch",
                odd.subject,
                f"rank {odd.rank} holds {odd.numel} elements of {partition.name}, other ranks {usual}",
            )
            return
        if partition.wanted is None or not partition.complete or not parts:
            return
        held = sum(p.numel for p in parts)
        if _rounded(held, partition.align) != _rounded(partition.wanted, partition.align):
            yield finding(
                "shape-mismatch",
                parts[0].subject,
                f"all ranks together hold {held} elements of {partition.name}, the model's own record asks for {partition.wanted}",
            )


def _rounded(numel: int, align: int) -> int:
    return -(-numel // align) * align


CHECK = Partitions()

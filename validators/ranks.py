from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.layouts._ranks import MOST, RANK_FILES, RankFiles
from ckptguard.model import Effect, Evidence, Finding, Severity
from ckptguard.ports import Subject
from ckptguard.validators._base import LOSSY_RANKS


class Ranks:
    """Whether every rank's file is there, counted against the world size that the files themselves record.

    Finds: ranks without their file, and files of ranks beyond the world size (left by a larger run under the same name).
    Why it matters: a sharded optimizer without one of its shards is lost; frameworks notice only when they load it.
    Example: DeepSpeed moved `latest` while another node was still writing; that node then died.
    What to do: copy the shard from the node that wrote it, or resume from the checkpoint before.
    Blind spots: layouts that record no world size (accelerate, the Trainer's RNG files) show only gaps in the numbers.
    """

    name = "ranks"
    needs = Evidence.STRUCTURE
    codes = ("missing-rank",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        known = {a.subject for a in facts.manifest.absences}
        for kind in facts.state.attributes.get(RANK_FILES, ()):
            missing = [
                r
                for r in range(kind.expected)
                if r not in kind.present and kind.pattern.format(r) not in known
            ]
            if missing and not kind.present:
                continue  # the whole kind is absent: a component is missing, and said to be so
            yield from self._missing(kind, missing)
            for rank in sorted(r for r in kind.present if r >= kind.expected):
                yield finding(
                    "missing-rank",
                    kind.pattern.format(rank),
                    f"{kind.what} of rank {rank} lies here, but there are {kind.expected} ranks ({kind.recorded_in}): it is of another save",
                    "remove it once you are sure that no larger run wrote this checkpoint",
                    severity=Severity.WARNING,
                    effect=Effect.NONE,
                )

    @staticmethod
    def _missing(kind: RankFiles, missing: list[int]) -> Iterator[Finding]:
        soft = kind.pattern.rpartition("/")[2].startswith(LOSSY_RANKS)
        for place, rank in enumerate(missing[:MOST], 1):
            more = f" (nor those of {len(missing) - MOST} more ranks)" if place == MOST < len(missing) else ""
            yield finding(
                "missing-rank",
                kind.pattern.format(rank),
                f"rank {rank} has no {kind.what} here{more}; there were {kind.expected} ranks ({kind.recorded_in})",
                severity=Severity.WARNING if soft else None,
                effect=Effect.LOSSY if soft else None,
            )


CHECK = Ranks()

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import Effect, Evidence, Finding, Severity
from ckptguard.ports import Subject
from ckptguard.validators._base import LOSSY_RANKS


class Completeness:
    """What names alone show: completion marks, ranks, temporary names.

    Finds: saves under a temporary name or without their completion mark, and ranks whose shard is not there.
    Why it matters: a folder with the highest number looks like the latest checkpoint even when its save was killed.
    Example: `ckpt_30.pt.tmp`, a DCP directory without `.metadata`, rank 3 of 4 missing.
    What to do: resume from the newest complete one; move the half one away.
    Blind spots: layouts without any mark (accelerate, plain files) are judged by their content only.
    """

    name = "completeness"
    needs = Evidence.LISTING
    codes = ("incomplete-save", "missing-file", "missing-rank")

    def run(self, subject: Subject) -> Iterator[Finding]:
        manifest = subject.facts.manifest
        if manifest.temporary:
            yield finding(
                "incomplete-save",
                manifest.path,
                f"{manifest.path}: the name is that of a save that never finished",
            )
        for absence in manifest.absences:
            soft = absence.code == "missing-rank" and absence.subject.rpartition("/")[2].startswith(
                LOSSY_RANKS
            )
            yield finding(
                absence.code,
                absence.subject,
                absence.message,
                absence.hint,
                severity=Severity.WARNING if soft else None,
                effect=Effect.LOSSY if soft else None,
            )


CHECK = Completeness()

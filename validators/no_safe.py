from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import Finding, Resume
from ckptguard.ports import RunSubject


class NoSafe:
    """Whether the run has any checkpoint to go back to.

    Finds: runs whose every checkpoint is unsafe or undecided.
    Why it matters: if the job dies now, everything is lost.
    Example: a rotation that kept only the checkpoint that was being written.
    What to do: save again now; look for copies.
    Blind spots: replicas elsewhere are not counted here.
    """

    name = "no-safe"
    codes = ("no-safe-checkpoint",)

    def run(self, subject: RunSubject) -> Iterator[Finding]:
        looked = [v for v in subject.verdicts if v.evidence.value != "listing"]
        if looked and not any(v.resume.safe or v.resume is Resume.WRITING for v in subject.verdicts):
            yield finding(
                "no-safe-checkpoint",
                subject.root.path or ".",
                f"none of the {len(subject.verdicts)} checkpoints here is safe to resume from",
                "save again now, if the training runs; look for a copy: ckptguard repair CHECKPOINT --from REPLICA",
            )


RUN_CHECK = NoSafe()

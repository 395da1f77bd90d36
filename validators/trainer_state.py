from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import Effect, Evidence, Finding, Role, Severity
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable


class TrainerState:
    """The trainer's own progress file.

    Finds: a checkpoint without trainer_state.json, or without the progress file that the run's other checkpoints have.
    Why it matters: it is written last, so its absence means a killed save; the Trainer refuses to resume without it.
    Example: a preemption between optimizer.pt and trainer_state.json.
    What to do: resume from the checkpoint before.
    Blind spots: it proves rank 0 only; other ranks write without a barrier.
    """

    name = "trainer-state"
    needs = Evidence.LISTING
    codes = ("missing-trainer-state",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        manifest = subject.facts.manifest
        if manifest.by_role(Role.TRAINER_STATE):
            return
        siblings = comparable(subject)
        if "trainer_state" not in manifest.carries:
            others = next((f for s in siblings for f in s.manifest.by_role(Role.TRAINER_STATE)), None)
            documented = "trainer_state" in manifest.documented_absent
            if others is not None and not documented and not manifest.attributes.get("one_file"):
                yield finding(
                    "missing-trainer-state",
                    manifest.path,
                    f"{manifest.path} has no {others.role.value.replace('_', ' ')} of its own, as {others.name} is in another checkpoint: where the training stood is not known",
                )
            return
        if len(siblings) >= 2 and not any(s.manifest.by_role(Role.TRAINER_STATE) for s in siblings):
            yield finding(
                "missing-trainer-state",
                manifest.path,
                f"{manifest.path} has no trainer state, as none of the run has: it was not the Trainer that saved it",
                severity=Severity.INFO,
                effect=Effect.LOSSY,
            )
            return
        refuses = manifest.layout == "hf-trainer"
        yield finding(
            "missing-trainer-state",
            "trainer_state.json" if refuses else manifest.path,
            f"{manifest.path} holds {len(manifest.files)} files and no trainer state: the save was cut short"
            + ("; the Trainer refuses to resume from it" if refuses else ""),
            severity=Severity.ERROR if refuses else None,
            effect=Effect.UNSAFE if refuses else None,
        )


CHECK = TrainerState()

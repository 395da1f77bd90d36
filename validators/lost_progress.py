from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding, Role
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, is_broken


class LostProgress:
    """Whether a checkpoint still says how far the training was, as the one before it does.

    Finds: counters of steps or samples, and parameter groups of an optimizer, that the checkpoint before has and this one
    has not, though it holds optimizer state.
    Why it matters: what counts from zero again repeats data and its warm-up, and corrects moments for steps never made.
    Example: a common.pt that was written again by a script that knew of the model only.
    What to do: resume from the checkpoint before, or put the numbers back by hand.
    Blind spots: the first checkpoint of a run.
    """

    name = "lost-progress"
    needs = Evidence.STRUCTURE
    codes = ("missing-trainer-state", "missing-optimizer")

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts, before = subject.facts, subject.previous
        if before is None or before not in comparable(subject) or is_broken(facts, [Role.TRAINER_STATE]):
            return
        if not _has_states(facts) or not _has_states(before) or _lacks_files(facts):
            return
        yield from self._groups(facts, before)
        if before.manifest.by_role(Role.TRAINER_STATE) and not facts.manifest.by_role(Role.TRAINER_STATE):
            return  # the file itself is gone, and said to be
        lost = sorted(_counters(before) - {c.name for c in facts.state.counters})
        if lost:
            yield finding(
                "missing-trainer-state",
                facts.path,
                f"{', '.join(lost[:3])} of {before.path} {'is' if len(lost) == 1 else 'are'} not there: where the training stood is not known",
            )

    @staticmethod
    def _groups(facts: CheckpointFacts, before: CheckpointFacts) -> Iterator[Finding]:
        then = {o.name for o in before.state.optimizers if o.groups}
        for optimizer in facts.state.optimizers:
            if optimizer.states and not optimizer.groups and optimizer.name in then:
                yield finding(
                    "missing-optimizer",
                    optimizer.subject,
                    f"the moments of {len(optimizer.states)} parameters are there, the optimizer's groups with its rates and steps are not",
                )


def _lacks_files(facts: CheckpointFacts) -> bool:
    """Whether files are known to be gone, so that what they held is gone with them, and told there."""
    gone = {a.code for a in facts.manifest.absences} | {p.code for _, p in facts.state.problems}
    return bool(gone & {"missing-file", "missing-rank"})


def _has_states(facts: CheckpointFacts) -> bool:
    return any(o.states for o in facts.state.optimizers)


def _counters(facts: CheckpointFacts) -> set[str]:
    """What was counted; not what a layout made of other counters where it found none."""
    counted = {c.name for c in facts.state.counters if c.unit in ("step", "samples")}
    return counted - {"name", "optimizer step"}


CHECK = LostProgress()

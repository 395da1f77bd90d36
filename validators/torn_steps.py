from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding, OptimizerState
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, number, stated_step

SHARE = 0.2  # of the parameters: fewer may have missed a gradient


class TornSteps:
    """Whether all parameters of an optimizer were saved at one step.

    Finds: optimizers of which a part is at the checkpoint's step, and the rest one step further.
    Why it matters: weights and moments of two steps were mixed while the training went on; what is resumed was never there.
    Example: an asynchronous save of parameters in main memory, without a copy of its own.
    What to do: resume from the checkpoint before; copy the state before it is saved in the background.
    Blind spots: optimizers without a step for each parameter. Parameters that lag behind the checkpoint's step (late
    unfrozen ones, experts without tokens) and runs whose every checkpoint looks so are taken as they are.
    """

    name = "torn-steps"
    needs = Evidence.STRUCTURE
    codes = ("mixed-saves",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        for place, optimizer in enumerate(subject.facts.state.optimizers):
            ahead = _ahead(subject.facts, optimizer)
            if not ahead or any(_torn(s, place) for s in comparable(subject)):
                continue
            yield finding(
                "mixed-saves",
                optimizer.subject,
                f"{ahead} of {len(optimizer.states)} optimizer states are one step further than step {stated_step(subject.facts)}, which the rest and the checkpoint are at: the training went on while it was saved",
            )


def _ahead(facts: CheckpointFacts, optimizer: OptimizerState) -> int:
    """How many states are one step further than the checkpoint, where the others are exactly at its step; else 0."""
    steps = [number(state.values.get("step")) for state in optimizer.states]
    now = stated_step(facts)
    if not now or not steps or set(steps) != {now, now + 1}:
        return 0
    ahead = steps.count(now + 1)
    return ahead if SHARE * len(steps) <= ahead <= (1 - SHARE) * len(steps) else 0


def _torn(facts: CheckpointFacts, place: int) -> bool:
    optimizers = facts.state.optimizers
    return place < len(optimizers) and _ahead(facts, optimizers[place]) > 0


CHECK = TornSteps()

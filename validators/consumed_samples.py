from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.layouts._ranks import SAMPLES, Samples
from ckptguard.model import CheckpointFacts, Evidence, Finding
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, stated_step


class ConsumedSamples:
    """Whether the number of consumed samples is what steps and batch size give.

    Finds: a sample counter that neither the run's own batch size nor its neighbours explain.
    Why it matters: samplers and curricula start from this number; half of it repeats data, twice of it skips some.
    Example: a counter restored from another checkpoint than the weights.
    What to do: resume from a checkpoint whose counter fits, or set the data position by hand.
    Blind spots: a batch size that was changed earlier in the run is believed where the steps to or from a neighbouring
    checkpoint fit the batch size that this one records.
    """

    name = "consumed-samples"
    needs = Evidence.STRUCTURE
    codes = ("data-position-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        samples, step = _samples(facts), stated_step(facts)
        if samples is None or step is None or samples.consumed == step * samples.batch:
            return
        for other in comparable(subject):
            theirs, at = _samples(other), stated_step(other)
            if theirs is None or at is None or at == step:
                continue
            # The batch size between two checkpoints is the one that the later of them records.
            batch = samples.batch if at < step else theirs.batch
            if samples.consumed - theirs.consumed == (step - at) * batch:
                return
        yield finding(
            "data-position-mismatch",
            samples.subject,
            f"{samples.name} is {samples.consumed} at step {step}; {samples.batch} samples a step ({samples.how}) make {step * samples.batch}",
        )


def _samples(facts: CheckpointFacts) -> Samples | None:
    found = facts.state.attributes.get(SAMPLES)
    return found if isinstance(found, Samples) else None


CHECK = ConsumedSamples()

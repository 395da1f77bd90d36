from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Counter, Evidence, Finding
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, stated_step

GROWING = ("samples", "tokens")


class SampleCounters:
    """Whether everything that counts samples stands at the same number.

    Finds: a schedule, a data position or a name that has consumed another number of samples than the rest, a schedule
    whose samples per step differ from those of the run's other checkpoints, and counters that went back.
    Why it matters: Megatron's schedule and its data position both start from such a counter; a wrong one gives a wrong
    learning rate, or data that is read again.
    Example: a common.pt taken from the checkpoint before.
    What to do: resume from a checkpoint whose counters agree.
    Blind spots: a schedule behind by whole batches in fp16 is taken as skipped updates; a constant difference that all
    checkpoints of the run show is taken as the way the run counts.
    """

    name = "sample-counters"
    needs = Evidence.STRUCTURE
    codes = ("data-position-mismatch", "step-mismatch")

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        counters = _samples(facts)
        siblings = comparable(subject)
        usual = max((c.value for c in counters), key=[c.value for c in counters].count, default=None)
        odd = [c for c in counters if c.value != usual]
        for counter in odd:
            if usual is None or self._explained(facts, siblings, counter, usual):
                continue
            others = ", ".join(c.name for c in counters if c.value == usual)
            yield finding(
                "step-mismatch" if counter.name.endswith("num_steps") else "data-position-mismatch",
                counter.subject,
                f"{counter.name} is at {counter.value} samples, {others} at {usual}",
            )
        if not odd:
            yield from self._pace(facts, siblings)
        yield from self._back(subject, siblings)

    @staticmethod
    def _back(subject: Subject, siblings: list[CheckpointFacts]) -> Iterator[Finding]:
        """What only ever grows, and is no further than in a checkpoint of fewer steps."""
        facts, before = subject.facts, subject.previous
        if before is None or before not in siblings:
            return
        then = {c.name: c.value for c in before.state.counters if c.unit in GROWING}
        for counter in facts.state.counters:
            if counter.unit in GROWING and counter.value <= then.get(counter.name, -1):
                yield finding(
                    "data-position-mismatch",
                    counter.subject,
                    f"{counter.name} is {counter.value} at step {stated_step(facts)}, in {before.path} it is {then[counter.name]} at step {stated_step(before)}",
                )

    @staticmethod
    def _explained(
        facts: CheckpointFacts, siblings: list[CheckpointFacts], counter: Counter, usual: int
    ) -> bool:
        attributes = facts.state.attributes
        if attributes.get("iterations_to_skip") or attributes.get("skipped_train_samples"):
            return True
        batch = attributes.get("global_batch_size")
        behind = usual - counter.value
        # A failed update moves the data on and the schedule not.
        if (
            (attributes.get("fp16") or any(s.values for s in facts.state.scalers))
            and behind > 0
            and isinstance(batch, int)
            and batch
            and behind % batch == 0
        ):
            return True
        for sibling in siblings:
            theirs = {c.name: c.value for c in _samples(sibling)}
            if (
                counter.name in theirs
                and any(v - theirs[counter.name] == behind for v in theirs.values())
                and len(theirs) > 1
            ):
                return True
        return False

    @staticmethod
    def _pace(facts: CheckpointFacts, siblings: list[CheckpointFacts]) -> Iterator[Finding]:
        """Samples per step against neighbours that agree with one another."""
        mine = _rate(facts)
        theirs = [r for r in map(_rate, siblings) if r is not None]
        if mine is None or len(theirs) < 2 or len(set(theirs)) > 1 or mine == theirs[0]:
            return
        counter = _samples(facts)[0]
        yield finding(
            "data-position-mismatch",
            counter.subject,
            f"{counter.name} is {counter.value} at step {stated_step(facts)}; all other checkpoints of the run have {theirs[0]:g} samples a step",
        )


def _samples(facts: CheckpointFacts) -> list[Counter]:
    return [c for c in facts.state.counters if c.unit == "samples"]


def _rate(facts: CheckpointFacts) -> float | None:
    counters, step = _samples(facts), stated_step(facts)
    return counters[0].value / step if counters and step else None


CHECK = SampleCounters()

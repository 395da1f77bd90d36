from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Finding
from ckptguard.ports import RunSubject


class Duplicates:
    """Two checkpoints of one series that claim the same step.

    Finds: the same stated step under two names of one series, with other weights.
    Why it matters: one of them is not what it says; which one is resumed from is chance.
    Example: step-20 restored from a backup of step 10.
    What to do: move the one that does not belong away.
    Blind spots: copies, `last` files and averaged twins of the same save are meant so and not reported.
    """

    name = "duplicates"
    codes = ("duplicate-checkpoint",)

    def run(self, subject: RunSubject) -> Iterator[Finding]:
        by_step: dict[tuple[str, str, int], list[CheckpointFacts]] = defaultdict(list)
        for facts in subject.facts:
            if facts.step is not None and not facts.manifest.temporary:
                by_step[facts.manifest.layout, facts.manifest.series, facts.step].append(facts)
        for (_, _, step), members in by_step.items():
            first = members[0]
            for other in members[1:]:
                if (
                    other.manifest.step is None
                    or first.manifest.step is None
                    or other.manifest.step == first.manifest.step
                ):
                    continue
                yield finding(
                    "duplicate-checkpoint", other.path, f"{first.path} and {other.path} both say step {step}"
                )


RUN_CHECK = Duplicates()

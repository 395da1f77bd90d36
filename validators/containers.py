from __future__ import annotations

from collections.abc import Iterator

from ckptguard.model import Evidence, Finding
from ckptguard.ports import Subject
from ckptguard.validators._base import from_problem, problems


class Containers:
    """Headers, indexes, pickles and bounds of every file.

    Finds: files that end too early, headers and pickles that cannot be parsed, tensors that reach outside their file,
    records that are missing from a valid archive, bytes that nothing refers to.
    Why it matters: half of such files fail at load, hours into the queue; the other half load with wrong content.
    Example: a job killed inside torch.save leaves a short file under the final name.
    What to do: take the file from a replica, or resume from the checkpoint before.
    Blind spots: a flipped bit in a payload needs a checksum (see checksums) or a seal.
    """

    name = "containers"
    needs = Evidence.STRUCTURE
    codes = (
        "bad-header",
        "truncated",
        "out-of-bounds",
        "size-mismatch",
        "shape-mismatch",
        "dtype-mismatch",
        "empty-file",
        "missing-tensor",
        "unindexed-tensor",
        "duplicate-tensor",
        "incomplete-save",
        "missing-optimizer",
        "missing-scheduler",
        "missing-rng",
    )

    def run(self, subject: Subject) -> Iterator[Finding]:
        for file, problem in problems(subject.facts, self.codes):
            yield from_problem(subject.facts, file.name, problem)
        for name, problem in subject.facts.state.problems:
            yield from_problem(subject.facts, name, problem)


CHECK = Containers()

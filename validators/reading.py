from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import Evidence, Finding
from ckptguard.ports import Subject
from ckptguard.validators._base import from_problem, problems


class Reading:
    """Whether the bytes could be read at all, twice the same, and stayed what they were.

    Finds: files that may not be read, devices and FIFOs in place of files, reads that differ, files replaced meanwhile.
    Why it matters: what could not be read is neither damaged nor fine; a verdict that hides this is worth nothing.
    Example: a shard with the permissions of another user.
    What to do: remove the cause and audit again.
    Blind spots: a second read past the page cache needs a store that can do it.
    """

    name = "reading"
    needs = Evidence.STRUCTURE
    codes = ("unreadable", "unstable-read", "changed-while-read", "missing-file", "check-failed")

    def run(self, subject: Subject) -> Iterator[Finding]:
        for file, problem in problems(subject.facts, self.codes):
            yield from_problem(subject.facts, file.name, problem)
        if subject.facts.changed:
            yield finding(
                "changed-while-read",
                subject.facts.path,
                f"{subject.facts.path} was replaced while it was being read, twice",
            )


CHECK = Reading()

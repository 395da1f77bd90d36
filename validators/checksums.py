from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptguard.model import Evidence, Finding
from ckptguard.ports import Subject
from ckptguard.validators._base import from_problem, problems, tensor_of_record


class Checksums:
    """The containers' own checksums.

    Finds: records whose CRC-32 differs from the one that the container recorded when it was written.
    Why it matters: PyTorch writes these checksums and never verifies them; a flipped bit loads without a word.
    Example: bit rot in one storage of a 20 GB file.
    What to do: repair from a replica, or resume from the checkpoint before.
    Blind spots: safetensors and legacy files carry none; files saved with set_crc32_options(False) neither.
    """

    name = "checksums"
    needs = Evidence.CONTENT
    codes = ("crc-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        for file, problem in problems(subject.facts, self.codes):
            tensor = tensor_of_record(file, problem.where)
            yield from_problem(subject.facts, file.name, replace(problem, where=tensor or problem.where))


CHECK = Checksums()

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping

from ckptguard.codes import finding
from ckptguard.errors import FormatError
from ckptguard.megatron_integrity import NAME, read_integrity, verify_integrity
from ckptguard.model import CheckpointFacts, Effect, Evidence, Finding, Severity
from ckptguard.ports import Subject


class IntegrityJson:
    """Megatron-core's own digests, where a run writes them.

    Finds: files whose SHA-256 differs from the one in `integrity.json`, and files that it lists and that are not there.
    Why it matters: Megatron verifies them only when told to, on one rank and one thread, while the job waits.
    Example: a shard replaced by that of another iteration, with valid checksums of its own.
    What to do: copy the file again from a replica, or resume from the checkpoint before.
    Blind spots: files that are not listed, such as a tokenizer that was copied later.
    """

    name = "integrity-json"
    needs = Evidence.CONTENT
    codes = ("digest-mismatch", "missing-file", "bad-header")

    def run(self, subject: Subject) -> Iterator[Finding]:
        for name, known in subject.facts.files.items():
            if posixpath.basename(name) != NAME or known.tree is None:
                continue
            try:
                expected = read_integrity(known.tree)
            except FormatError as e:
                yield finding(e.code, name, str(e), severity=Severity.WARNING, effect=Effect.NONE)
                continue
            yield from self._folder(subject, posixpath.dirname(name), expected)

    @staticmethod
    def _folder(subject: Subject, folder: str, expected: Mapping[str, str]) -> Iterator[Finding]:
        facts = subject.facts
        prefix = f"{folder}/" if folder else ""
        there = {f.name[len(prefix) :]: f.entry for f in facts.manifest.files if f.name.startswith(prefix)}
        for name in sorted(expected.keys() - there.keys()):
            yield finding("missing-file", prefix + name, f"{prefix}{NAME} lists {name}, which is not there")
        if subject.store is None:
            return
        sizes = {name: entry.size for name, entry in there.items()}
        for wrong in verify_integrity(subject.store, _place(facts, folder), expected, sizes):
            yield finding(
                "digest-mismatch",
                prefix + wrong.name,
                f"the SHA-256 of {prefix}{wrong.name} is {wrong.found[:16]}..., {NAME} recorded {wrong.expected[:16]}...",
            )


def _place(facts: CheckpointFacts, folder: str) -> str:
    return "/".join(part for part in (facts.path, folder) if part)


CHECK = IntegrityJson()

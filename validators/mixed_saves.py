from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Effect, Evidence, Finding, ManifestFile, Role, Severity
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, number

JITTER = 2.0  # seconds by which clocks and time stamps of one save may disagree
COPYING = 900.0  # how long a copy may take between two of its files, before its size is counted
SLOW = 5e6  # bytes a second of a slow copy
MOMENT = re.compile(r"exp_avg|momentum|square_avg|exp_inf")
ENOUGH = 3  # counters in a file that make its step certain


class MixedSaves:
    """Whether all files of a directory are of one save.

    Finds: a directory that was saved into again and never finished (data newer than the mark that was written last),
    shards that the metadata knows nothing of, files whose optimizer steps contradict those in the other files, shards
    that are those of another checkpoint of the run.
    Why it matters: DCP keeps the old `.metadata` until the new one is complete; old metadata over new data loads without
    an error and mixes two steps.
    Example: a job that saves into `latest/` each time, killed in the middle of a save.
    What to do: resume from another checkpoint; save every step into a directory of its own.
    Blind spots: copies get new times, so data that is newer than its mark by less than a copy takes is information only;
    a shard of another save that is of no checkpoint in this run, where no step is stored beside it (Megatron).
    """

    name = "mixed-saves"
    needs = Evidence.STRUCTURE
    codes = ("mixed-saves",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        yield from self._times(facts)
        yield from self._orphans(facts)
        yield from self._steps(facts)
        yield from self._borrowed(subject)

    @staticmethod
    def _times(facts: CheckpointFacts) -> Iterator[Finding]:
        """Marks are written last; data that is newer was written by another save, or copied."""
        if sealed(facts):
            return
        for mark in facts.manifest.files:
            if posixpath.basename(mark.name) not in (".metadata", "metadata.json"):
                continue
            folder = posixpath.dirname(mark.name)
            shards = [
                f
                for f in facts.manifest.by_role(Role.SHARD)
                if posixpath.dirname(f.name) == folder and f.entry.size
            ]
            newer = sorted(
                (f for f in shards if f.entry.modified > mark.entry.modified + JITTER),
                key=lambda f: f.entry.modified,
            )
            if not newer:
                continue
            late = newer[0].entry.modified - mark.entry.modified
            copied = late <= COPYING + newer[0].entry.size / SLOW
            yield finding(
                "mixed-saves",
                newer[0].name,
                f"{len(newer)} of {len(shards)} shards are newer than {mark.name}, the first by {late:.0f} seconds, and it is written last: "
                + (
                    "they were copied, or a later save into this directory did not finish"
                    if copied
                    else "a later save into this directory did not finish"
                ),
                severity=Severity.INFO if copied else None,
                effect=Effect.NONE if copied else None,
            )
            return

    @staticmethod
    def _orphans(facts: CheckpointFacts) -> Iterator[Finding]:
        orphans = [f for f in facts.manifest.by_role(Role.SHARD) if _is_orphan(facts, f)]
        if orphans:
            names = ", ".join(f.name for f in orphans[:4])
            yield finding(
                "mixed-saves",
                orphans[0].name,
                f"{len(orphans)} shards with {sum(f.entry.size for f in orphans)} bytes are not of this save, the metadata knows nothing of them: {names}",
                "delete them once you are sure of it; loading does not touch them",
                severity=Severity.WARNING,
                effect=Effect.NONE,
            )

    @staticmethod
    def _steps(facts: CheckpointFacts) -> Iterator[Finding]:
        """Steps that are the same all over one file and differ from those all over another."""
        by_file: dict[str, list[float]] = {}
        for optimizer in facts.state.optimizers:
            for state in optimizer.states:
                tensor = state.values.get("step")
                step = number(tensor)
                file = facts.state.subjects.get(id(tensor), "").partition(":")[0]
                if step is not None and file.endswith(".distcp"):
                    by_file.setdefault(file, []).append(step)
        sure = {
            file: steps[0] for file, steps in by_file.items() if len(steps) >= ENOUGH and len(set(steps)) == 1
        }
        if len(sure) < 2 or len(sure) < len(by_file) or len(set(sure.values())) < 2:
            return
        usual = max(sure.values(), key=list(sure.values()).count)
        odd = next((file for file, step in sure.items() if step != usual), None)
        if odd is not None:
            yield finding(
                "mixed-saves",
                odd,
                f"every optimizer step in {odd} is {sure[odd]:.0f}, in the other shards {usual:.0f}",
            )

    @staticmethod
    def _borrowed(subject: Subject) -> Iterator[Finding]:
        """A shard that is bit for bit that of an earlier checkpoint, moments included, though the other shards are not."""
        mine = _fingerprints(subject.facts)
        for sibling in comparable(subject):
            # Of two that share a shard, the later one is wrong: a save that did not finish keeps what was there before.
            if _place(sibling) >= _place(subject.facts):
                continue
            theirs = _fingerprints(sibling)
            same = sorted(name for name, prints in mine.items() if prints and theirs.get(name) == prints)
            if same and any(theirs.get(name, prints) != prints for name, prints in mine.items()):
                yield finding(
                    "mixed-saves",
                    same[0],
                    f"{same[0]} is bit for bit that of {sibling.path}, optimizer moments included, and other shards are not",
                )
                return


def _place(facts: CheckpointFacts) -> int:
    """The step by the name, which a mixed-up shard cannot change; else by the content."""
    return facts.manifest.step if facts.manifest.step is not None else facts.step or 0


def sealed(facts: CheckpointFacts) -> bool:
    """Whether digests recorded at the save prove the files: then their times say nothing."""
    return facts.seal is not None and facts.evidence >= Evidence.CONTENT


def _is_orphan(facts: CheckpointFacts, file: ManifestFile) -> bool:
    known = facts.files.get(file.name)
    if known is None or not file.entry.size or known.kind != "dcp-shard" or not known.details.get("indexed"):
        return False
    return not known.details.get("items")


def _fingerprints(facts: CheckpointFacts) -> dict[str, tuple[str, ...]]:
    """The digests of everything in each shard that holds moments, which every step changes; () for other shards."""
    result: dict[str, tuple[str, ...]] = {}
    for file in facts.manifest.by_role(Role.SHARD):
        known = facts.files.get(file.name)
        if known is None or not known.tensors or any(t.facts is None for t in known.tensors if t.nbytes):
            continue
        prints = tuple(
            f"{t.name} {t.facts.digest}" for t in known.tensors if t.facts is not None and not t.facts.zeros
        )
        moving = any(
            MOMENT.search(t.name) for t in known.tensors if t.facts is not None and not t.facts.zeros
        )
        result[file.name] = prints if moving else ()
    return result


CHECK = MixedSaves()

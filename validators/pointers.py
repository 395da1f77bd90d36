from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import Finding, Pointer, Resume, Severity, Verdict
from ckptguard.ports import RunSubject

SAME_COPY = 120.0  # seconds within which the times of a copied tree lie


class Pointers:
    """What the run's latest pointers name.

    Finds: pointers that name nothing, an unsafe checkpoint, one that is not complete, or an older one than the newest.
    Why it matters: the framework follows the pointer, not the newest good checkpoint.
    Example: DeepSpeed moves `latest` before the other ranks have written their shards.
    What to do: resume by ckptguard preflight, or correct the pointer.
    Blind spots: a pointer touched after the newest save may be a deliberate roll-back and is not called stale.
    """

    name = "pointers"
    codes = ("stale-pointer", "dangling-pointer", "pointer-to-unsafe", "early-pointer")

    def run(self, subject: RunSubject) -> Iterator[Finding]:
        verdicts = {f.path: v for f, v in zip(subject.facts, subject.verdicts)}
        for pointer in subject.pointers:
            if pointer.resolved is None:
                says = "".join(c for c in pointer.names if c.isprintable())
                yield finding(
                    "dangling-pointer",
                    pointer.entry.key,
                    f"{pointer.entry.key} names {says}, which is not there"
                    if says
                    else f"{pointer.entry.key} is empty, or holds no name",
                )
                continue
            named = verdicts.get(pointer.resolved)
            if named is None:
                continue
            if named.resume is Resume.WRITING:
                yield finding(
                    "early-pointer",
                    pointer.entry.key,
                    f"{pointer.entry.key} names {pointer.names}, which is still being written",
                    severity=Severity.INFO,
                )
            elif any(f.code == "incomplete-save" for f in named.findings) and not named.resume.safe:
                yield finding(
                    "early-pointer",
                    pointer.entry.key,
                    f"{pointer.entry.key} names {pointer.names}, whose save never finished",
                )
                yield self._unsafe(pointer, named)
            elif named.resume is Resume.UNSAFE:
                yield self._unsafe(pointer, named)
            else:
                yield from self._stale(subject, pointer, named, verdicts)

    @staticmethod
    def _unsafe(pointer: Pointer, named: Verdict) -> Finding:
        why = next((f.code for f in named.findings if f.effect.value == "unsafe"), "")
        return finding(
            "pointer-to-unsafe",
            pointer.entry.key,
            f"{pointer.entry.key} names {pointer.names}, which is unsafe ({why})",
        )

    @staticmethod
    def _stale(
        subject: RunSubject, pointer: Pointer, named: Verdict, verdicts: dict[str, Verdict]
    ) -> Iterator[Finding]:
        if pointer.kind == "best" or named.step is None:
            return
        target = next((f.manifest for f in subject.facts if f.path == pointer.resolved), None)
        if target is None:
            return
        newer = [
            (v, f)
            for f in subject.facts
            if f.manifest.series == target.series
            and f.manifest.modified >= target.modified - SAME_COPY  # higher and older: of another run
            and (v := verdicts[f.path]).resume.safe
            and v.step is not None
            and v.step > (named.step or 0)
        ]
        if not newer:
            return
        newest, facts = max(newer, key=lambda p: p[0].step or 0)
        if subject.now - facts.manifest.modified < subject.grace:
            return
        times = [f.manifest.modified for f in subject.facts] + [pointer.entry.modified]
        copied = max(times) - min(times) <= SAME_COPY
        if not copied and pointer.entry.modified > facts.manifest.modified:
            return
        yield finding(
            "stale-pointer",
            pointer.entry.key,
            f"{pointer.entry.key} names {pointer.names} (step {named.step}), {newest.path} (step {newest.step}) is complete",
        )


RUN_CHECK = Pointers()

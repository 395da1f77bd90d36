from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding
from ckptguard.ports import Subject

SMALL_SHARE = 0.02


class Unverifiable:
    """Bytes that nothing can prove.

    Finds: payloads without a checksum and without a seal.
    Why it matters: a flipped bit in them cannot be seen; only a tenth of a percent of such damage shows as NaN.
    Example: every safetensors file.
    What to do: seal right after saving (ckptguard seal, or the recorder), or keep a replica with checksums.
    Blind spots: none: it says what the others are blind to.
    """

    name = "unverifiable"
    needs = Evidence.CONTENT
    codes = ("unverifiable",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        bare = unproven(subject.facts)
        if bare:
            total = sum(bare.values())
            files = ", ".join(sorted(bare)[:4]) + (f" and {len(bare) - 4} more" if len(bare) > 4 else "")
            yield finding(
                "unverifiable", sorted(bare)[0], f"{total} bytes have neither a checksum nor a seal: {files}"
            )


def unproven(facts: CheckpointFacts) -> dict[str, int]:
    """Bytes of tensors that were read and matched against nothing, by file."""
    if facts.evidence < Evidence.CONTENT:
        return {}
    result = {}
    for file in facts.files.values():
        held = sum({t.start: t.nbytes for t in file.tensors if t.start is not None}.values())
        missing = held - file.bytes_proven
        if held and missing > max(0, SMALL_SHARE * held) and file.kind:
            result[file.name] = missing
    return result


CHECK = Unverifiable()

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding
from ckptguard.ports import Subject


class SealCheck:
    """The bytes against the seal that was taken of them.

    Finds: blocks that differ from the seal, files of the seal that are gone, tensors on disk that are not those that
    were in memory when the save began.
    Why it matters: it is the only proof for safetensors, and for what happened between memory and disk.
    Example: one flipped bit in model.safetensors, two months after the save.
    What to do: ckptguard repair CHECKPOINT --from REPLICA mends exactly the damaged blocks.
    Blind spots: files that were replaced since (other size or time) are not compared: the seal is stale for them.
    """

    name = "seal"
    needs = Evidence.CONTENT
    codes = ("digest-mismatch", "missing-file")

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        seal = facts.seal
        if seal is None:
            return
        entries = {f.name: f.entry for f in facts.manifest.files}
        if seal.stale_for(entries):
            return
        for name, sealed in seal.files.items():
            entry = entries.get(name)
            if entry is None:
                yield finding(
                    "missing-file", name, f"{name} was sealed with {sealed.size} bytes and is not there"
                )
                continue
            known = facts.files.get(name)
            if known is None or not known.blocks or not sealed.fits(entry):
                continue
            damaged = [i for i, (a, b) in enumerate(zip(known.blocks, sealed.blocks)) if a != b]
            if damaged:
                size = seal.block_size
                where = ", ".join(f"{i * size}-{min((i + 1) * size, sealed.size)}" for i in damaged[:4])
                yield finding(
                    "digest-mismatch",
                    name,
                    f"{len(damaged)} of {len(sealed.blocks)} blocks of {name} differ from the seal (bytes {where})",
                )
        yield from self._memory(facts)

    @staticmethod
    def _memory(facts: CheckpointFacts) -> Iterator[Finding]:
        seal = facts.seal
        if seal.tensors_from != "memory":
            return
        differ, compared = [], 0
        for name, tensor in facts.state.model.items():
            sealed = seal.tensors.get(f"model/{name}")
            if sealed is None or tensor.facts is None or tensor.facts.nbytes != tensor.nbytes:
                continue
            if not tensor.contiguous or sealed.dtype != tensor.dtype or tuple(sealed.shape) != tensor.shape:
                continue
            compared += 1
            if sealed.digest != tensor.facts.digest:
                differ.append((name, tensor))
        if len(differ) == compared and compared > 1:
            return  # another model was recorded than the one that is saved (averaged weights): it proves nothing here
        for name, tensor in differ:
            yield finding(
                "digest-mismatch",
                facts.state.subject(tensor),
                f"{name} on disk is not what was in memory when it was saved",
            )


CHECK = SealCheck()

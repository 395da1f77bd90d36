from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckptguard.codes import finding
from ckptguard.model import Evidence, Finding, Tensor
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, reached_step

NUMBER = re.compile(r"\d+")
EMBEDDING = re.compile(
    r"(^|\.)(wte|wpe|embed_tokens|embed_in|word_embeddings|tok_embeddings|token_embedding|embeddings?|emb)\.weight$"
)


class ZeroWeights:
    """Weight matrices that are all zero.

    Finds: a matrix of zeros where a sibling checkpoint, or the same matrix of other layers, has numbers; and, in files
    without checksums, pages of 4096 zero bytes inside a matrix that a sibling checkpoint does not have.
    Why it matters: it loads and trains; the loss moves by a hundredth, and the layer learns from nothing.
    Example: a tensor whose storage was allocated and never filled.
    What to do: resume from the checkpoint before.
    Blind spots: matrices that are zero by design in every checkpoint and every layer; LoRA's B matrices and other layers
    that start from zero are expected to be zero at step 0 only. A zeroed part of a matrix in a run's only checkpoint needs a
    checksum or a seal.
    """

    name = "zero-weights"
    needs = Evidence.CONTENT
    codes = ("zero-weights",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        if reached_step(facts) in (0, None) and not facts.state.optimizers:
            return
        if reached_step(facts) == 0:
            return
        weights = facts.state.model
        for name, tensor in weights.items():
            if not _is_zero(tensor):
                yield from self._pages(subject, name, tensor)
                continue
            reason = self._reason(subject, name, weights)
            if reason:
                yield finding(
                    "zero-weights",
                    facts.state.subject(tensor),
                    f"all {tensor.numel} numbers of {name} are zero; {reason}",
                )

    @staticmethod
    def _pages(subject: Subject, name: str, tensor: Tensor) -> Iterator[Finding]:
        """A part that a disk or a copy lost: what all siblings have as zeros (padding, pruning) is meant so."""
        if (
            tensor.facts is None
            or not tensor.facts.zero_pages
            or not tensor.dtype.startswith(("float", "bfloat"))
        ):
            return
        others = [
            (s.path, o.facts.zero_pages)
            for s in comparable(subject)
            if reached_step(s)
            and (o := s.state.model.get(name)) is not None
            and o.facts is not None
            and o.shape == tensor.shape
        ]
        if others and all(pages < tensor.facts.zero_pages for _, pages in others):
            path, pages = others[0]
            yield finding(
                "zero-weights",
                subject.facts.state.subject(tensor),
                f"{tensor.facts.zero_pages} pages of 4096 bytes of {name} are zero, in {path} {pages} are",
            )

    @staticmethod
    def _reason(subject: Subject, name: str, weights: Mapping[str, Tensor]) -> str:
        for sibling in comparable(subject):
            other = sibling.state.model.get(name)
            if other is not None and other.facts is not None:
                if other.facts.zeros:
                    return ""
                if reached_step(sibling):
                    return f"in {sibling.path} they are not"
        if "lora_B" in name:
            return ""
        pattern = NUMBER.sub("#", name)
        peers = [
            t
            for n, t in weights.items()
            if n != name and NUMBER.sub("#", n) == pattern and t.facts is not None
        ]
        if any(not p.facts.zeros for p in peers if p.facts is not None):
            return "in other layers they are not"
        return "an embedding never is" if EMBEDDING.search(name) else ""


def _is_zero(tensor: Tensor) -> bool:
    floating = tensor.dtype.startswith(("float", "bfloat"))
    return (
        floating
        and len(tensor.shape) >= 2
        and tensor.numel >= 4
        and tensor.facts is not None
        and tensor.facts.zeros
    )


CHECK = ZeroWeights()

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import Evidence, Finding
from ckptguard.ports import Subject
from ckptguard.validators._base import EMBEDDING, comparable


class Tokenizer:
    """Whether the tokenizer fits the weights and the run.

    Finds: ids beyond the embedding's rows, and a vocabulary that changed within the run.
    Why it matters: an id without a row crashes on some batch, hours later; a changed vocabulary trains on other words.
    Example: a tokenizer with tokens added for chat, copied over the training's.
    What to do: put back the tokenizer of the checkpoint before.
    Blind spots: tokenizers other than tokenizer.json are not read. More rows than ids is padding, and normal.
    """

    name = "tokenizer"
    needs = Evidence.STRUCTURE
    codes = ("tokenizer-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        state = subject.facts.state
        if state.tokenizer_size is None:
            return
        embedding = next(
            (t for n, t in state.model.items() if EMBEDDING.search(n) and len(t.shape) == 2 and t.numel), None
        )
        if embedding is not None and state.tokenizer_size > embedding.shape[0]:
            yield finding(
                "tokenizer-mismatch",
                state.tokenizer_subject,
                f"the tokenizer gives ids up to {state.tokenizer_size - 1}, the embedding has {embedding.shape[0]} rows",
            )
        before = subject.previous
        if before is None or before not in comparable(subject):
            return
        mine, theirs = (
            state.attributes.get("tokenizer_vocabulary"),
            before.state.attributes.get("tokenizer_vocabulary"),
        )
        if mine and theirs and mine != theirs:
            yield finding(
                "tokenizer-mismatch", state.tokenizer_subject, f"the vocabulary is not that of {before.path}"
            )


CHECK = Tokenizer()

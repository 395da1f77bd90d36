from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptguard.codes import finding
from ckptguard.layouts._state import strip_wrappers
from ckptguard.model import CheckpointFacts, Effect, Evidence, Finding, Severity, Tensor
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, is_broken, reached_step


class Ema:
    """Averaged weights (EMA, SWA).

    Finds: averaged weights without raw ones, averages that earlier checkpoints of the run have and this one lacks, that equal the raw weights, that
    did not move since the checkpoint before, or whose shapes are not the model's.
    Why it matters: the training loss does not show it; the model that is evaluated and shipped is the averaged one.
    Example: a resume that filled the average with raw weights.
    What to do: take the average from another checkpoint, or rebuild it.
    Blind spots: an average of a wrong decay; the first checkpoints, where average and weights may be the same.
    """

    name = "ema"
    needs = Evidence.STRUCTURE
    codes = ("ema-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        siblings = comparable(subject)
        if facts.state.attributes.get("only_averaged"):
            if facts.state.optimizers:  # without any, it is an export, and says so by what it lacks
                yield from self._alone(facts, siblings)
            return
        if not facts.state.ema:
            if any(_averaging(s) for s in _earlier(facts, siblings)) and not is_broken(facts, []):
                yield finding(
                    "ema-mismatch",
                    facts.path,
                    f"{facts.path} has no averaged weights, earlier checkpoints of the run have them",
                )
            return
        model = {strip_wrappers(n): t for n, t in facts.state.model.items()}
        ema = {strip_wrappers(n): t for n, t in facts.state.ema.items()}
        for name, tensor in ema.items():
            if name in model and model[name].shape != tensor.shape:
                yield finding(
                    "ema-mismatch",
                    facts.state.subject(tensor),
                    f"the average of {name} has the shape {list(tensor.shape)}, the weight {list(model[name].shape)}",
                    severity=Severity.ERROR,
                    effect=Effect.UNSAFE,
                )
                return
        yield from self._raw(facts, siblings, model, ema)
        yield from self._stale(subject, siblings, ema)

    @staticmethod
    def _alone(facts: CheckpointFacts, siblings: list[CheckpointFacts]) -> Iterator[Finding]:
        """Averages without the weights that they are of: made to be used, not to be trained on."""
        usual = len(siblings) > 1 and all(s.state.attributes.get("only_averaged") for s in siblings)
        yield finding(
            "ema-mismatch",
            facts.path,
            f"{facts.path} holds averaged weights alone: training would go on from the average, with an optimizer of the raw weights",
            severity=Severity.INFO if usual else None,
        )

    @staticmethod
    def _raw(
        facts: CheckpointFacts,
        siblings: list[CheckpointFacts],
        model: Mapping[str, Tensor],
        ema: Mapping[str, Tensor],
    ) -> Iterator[Finding]:
        if not _same(model, ema) or not reached_step(facts):
            return
        if facts.state.attributes.get("ema_updates") in (0, 1):
            return  # the first update of an average is a copy
        earlier = _earlier(facts, siblings)
        if earlier and not any(_averaging(s) for s in earlier):
            return  # and averaging may begin late in a run
        others = [s for s in siblings if reached_step(s) and _averaging(s)]
        alike = [s for s in others if _is_raw(s)]
        first = min(others, key=lambda s: reached_step(s) or 0, default=None)
        if alike and (len(alike) == len(others) or any(s is not first for s in alike)):
            return  # so it is in this run, and not in its first average only
        yield finding(
            "ema-mismatch",
            facts.path,
            f"the averaged weights of {facts.path} are the raw weights, bit for bit",
        )

    @staticmethod
    def _stale(
        subject: Subject, siblings: list[CheckpointFacts], ema: Mapping[str, Tensor]
    ) -> Iterator[Finding]:
        before = subject.previous
        if before is None or before not in siblings or not before.state.ema:
            return
        if _same({strip_wrappers(n): t for n, t in before.state.ema.items()}, ema) and not _same(
            before.state.model, subject.facts.state.model
        ):
            yield finding(
                "ema-mismatch",
                subject.facts.path,
                f"the averaged weights are those of {before.path}, bit for bit, though the weights moved on",
            )


def _is_raw(facts: CheckpointFacts) -> bool:
    return _same(
        {strip_wrappers(n): t for n, t in facts.state.model.items()},
        {strip_wrappers(n): t for n, t in facts.state.ema.items()},
    )


def _averaging(facts: CheckpointFacts) -> bool:
    return bool(facts.state.ema) and not facts.state.attributes.get("only_averaged")


def _earlier(facts: CheckpointFacts, siblings: list[CheckpointFacts]) -> list[CheckpointFacts]:
    """The checkpoints before this one; all of them where no steps are known."""
    mine = reached_step(facts)
    if mine is None:
        return siblings
    return [s for s in siblings if (step := reached_step(s)) is not None and step < mine]


def _same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    """Whether all float tensors that both have are bitwise equal (False while their bytes were not read)."""
    pairs = [
        (a.facts, two[n].facts)
        for n, a in one.items()
        if n in two and a.dtype.startswith(("float", "bfloat")) and a.numel > 1
    ]
    return bool(pairs) and all(a is not None and b is not None and a.digest == b.digest for a, b in pairs)


CHECK = Ema()

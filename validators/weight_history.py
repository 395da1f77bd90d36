from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping

from ckptguard.codes import finding
from ckptguard.layouts._state import strip_wrappers
from ckptguard.model import CheckpointFacts, Effect, Evidence, Finding, Severity, Tensor
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, number, stated_step

# Adam moves a number by at most about its learning rate over sqrt(1 - beta2) a step (Kingma & Ba 2015, section 2.1).
REACH = 40.0


class WeightHistory:
    """Weights against those of the run's checkpoint before.

    Finds: weights that are bitwise the earlier ones though steps passed, and tensors whose norm left the run's own range.
    Why it matters: a dead optimizer trains for days on unchanged weights; a scaled matrix survives every load.
    Example: a model file copied from the checkpoint before; an optimizer that still holds the parameters of a wrapper.
    What to do: resume from the checkpoint before, after finding out why.
    Blind spots: the first checkpoint of a run; frozen parameters are told from frozen training only as a whole.
    """

    name = "weight-history"
    needs = Evidence.CONTENT
    codes = ("frozen-weights", "weight-jump")

    def run(self, subject: Subject) -> Iterator[Finding]:
        before = subject.previous
        facts = subject.facts
        if before is None or before not in comparable(subject):
            return
        pairs = _pairs(before.state.model, facts.state.model)
        if not pairs:
            return
        if all(
            a.facts is not None and b.facts is not None and a.facts.digest == b.facts.digest
            for a, b in pairs.values()
        ):
            if facts.state.attributes.get("ema_as_model") or _all_skipped(facts, before):
                return
            yield finding(
                "frozen-weights",
                facts.path,
                f"all {len(pairs)} weights are those of {before.path}, bit for bit, though {(stated_step(facts) or 0) - (stated_step(before) or 0)} steps passed",
            )
            return
        yield from self._jumps(facts, before, pairs)

    @staticmethod
    def _jumps(
        facts: CheckpointFacts, before: CheckpointFacts, pairs: Mapping[str, tuple[Tensor, Tensor]]
    ) -> Iterator[Finding]:
        if not stated_step(before):
            return  # fresh weights may go anywhere
        ratios = {
            n: math.log(b.facts.norm / a.facts.norm)
            for n, (a, b) in pairs.items()
            if _has_norm(a) and _has_norm(b) and a.facts and b.facts and a.facts.norm and b.facts.norm
        }
        if len(ratios) < 3:
            return
        middle = statistics.median(ratios.values())
        for name, ratio in ratios.items():
            if abs(ratio - middle) < math.log(10) or pairs[name][0].numel < 16:
                continue
            a, b = pairs[name][0].facts, pairs[name][1].facts
            assert a is not None and b is not None and a.norm is not None and b.norm is not None
            impossible = _impossible(facts, before, abs(b.norm - a.norm), pairs[name][1].numel)
            yield finding(
                "weight-jump",
                facts.state.subject(pairs[name][1]),
                f"the norm of {name} went from {a.norm:.4g} in {before.path} to {b.norm:.4g}; the other weights changed by a factor of {math.exp(middle):.3g}"
                + ("; no learning rate of this run could do that in so many steps" if impossible else ""),
                severity=Severity.ERROR if impossible else None,
                effect=Effect.LOSSY if impossible else None,
            )


def _pairs(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    old = {strip_wrappers(n): t for n, t in before.items()}
    return {
        n: (old[k], t)
        for n, t in now.items()
        if (k := strip_wrappers(n)) in old
        and t.dtype.startswith(("float", "bfloat"))
        and t.numel > 1
        and old[k].shape == t.shape
    }


def _has_norm(tensor: Tensor) -> bool:
    return tensor.facts is not None and bool(tensor.facts.norm) and tensor.facts.finite


def _impossible(facts: CheckpointFacts, before: CheckpointFacts, change: float, numel: int) -> bool:
    """Whether a tensor moved further than its optimizer's steps could have carried it."""
    rates = [
        v
        for c in (facts, before)
        for o in c.state.optimizers
        for g in o.groups
        for k in ("lr", "initial_lr")
        if (v := number(g.options.get(k))) is not None
    ]
    rates += [
        v
        for c in (facts, before)
        for s in c.state.schedulers
        for r in s.values.get("base_lrs") or ()
        if (v := number(r)) is not None
    ]
    steps = (stated_step(facts) or 0) - (stated_step(before) or 0)
    adaptive = any("betas" in g.options for o in facts.state.optimizers for g in o.groups)
    return bool(rates) and adaptive and change > REACH * max(rates) * steps * math.sqrt(numel)


def _all_skipped(facts: CheckpointFacts, before: CheckpointFacts) -> bool:
    """Whether the loss scaler skipped every step since the checkpoint before."""
    skipped, earlier = facts.state.skipped_steps, before.state.skipped_steps
    if skipped is None or earlier is None:
        return False
    return skipped - earlier == (stated_step(facts) or 0) - (stated_step(before) or 0) > 0


CHECK = WeightHistory()

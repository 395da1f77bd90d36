from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Effect, Evidence, Finding, Severity, Tensor
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, number, reached_step, weight_pairs

TENFOLD = math.log(10)
# Adam moves a number by at most about its learning rate over sqrt(1 - beta2) a step (Kingma & Ba 2015, section 2.1).
REACH = 40.0
# Where nothing tells how far the steps could go: numbers so small are still on their way from zero.
YOUNG = 1e-3


@dataclass(frozen=True, slots=True)
class Jump:
    """A tensor whose norm changed otherwise than the rest: by `ratio` (a logarithm), `reach` times what steps make."""

    tensor: Tensor
    before: float
    now: float
    ratio: float
    usual: float
    reach: float | None


class WeightJumps:
    """Tensors whose norm left the run's own range.

    Finds: a tensor that grew or shrank tenfold between two checkpoints while the others did not, and whose optimizer's
    steps do not explain it.
    Why it matters: a scaled matrix, or an adapter that was initialised again, survives every load.
    Example: one weight matrix a hundred times too large after a faulty conversion.
    What to do: resume from the checkpoint before, after finding out why.
    Blind spots: changes of less than tenfold; growth from zero where no optimizer tells how far its steps can go.
    """

    name = "weight-jumps"
    needs = Evidence.CONTENT
    codes = ("weight-jump",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        run = sorted(
            (
                s
                for s in (facts, *comparable(subject))
                if reached_step(s) and (s is facts or s.path not in subject.unsafe)
            ),
            key=lambda s: reached_step(s) or 0,
        )
        if facts not in run:
            return  # fresh weights may go anywhere
        place = run.index(facts)
        if place == 0:
            yield from self._first(facts, run[1:3])
            return
        before = run[place - 1]
        witness = run[place - 2] if place > 1 else run[place + 1] if place + 1 < len(run) else None
        # The one before is the odd one where its other neighbour agrees with this checkpoint.
        odd = jumps(witness, facts) if witness is not None and place > 1 else jumps(facts, witness)
        for name, jump in jumps(before, facts).items():
            if witness is not None and name not in odd and (place > 1 or _impossible(jump)):
                continue
            yield _say(facts, before, name, jump)

    @staticmethod
    def _first(facts: CheckpointFacts, later: list[CheckpointFacts]) -> Iterator[Finding]:
        """The first checkpoint is the odd one where the two after it agree, and no steps lead from it to them."""
        if len(later) < 2:
            return
        between = jumps(later[0], later[1])
        for name, jump in jumps(facts, later[0]).items():
            if name not in between and _impossible(jump):
                yield _say(facts, later[0], name, jump, backwards=True)


def _say(
    facts: CheckpointFacts, other: CheckpointFacts, name: str, jump: Jump, *, backwards: bool = False
) -> Finding:
    tensor = facts.state.model.get(name, jump.tensor)
    impossible = _impossible(jump)
    mine, theirs = (jump.before, jump.now) if backwards else (jump.now, jump.before)
    return finding(
        "weight-jump",
        facts.state.subject(tensor),
        f"the norm of {name} is {mine:.4g}, in {other.path} it is {theirs:.4g}; the other weights changed by a factor of {math.exp(jump.usual):.3g}"
        + ("; no learning rate of this run could do that in so many steps" if impossible else ""),
        severity=Severity.ERROR if impossible else None,
        effect=Effect.LOSSY if impossible else None,
    )


def _impossible(jump: Jump) -> bool:
    return jump.reach is not None and jump.reach > REACH


def jumps(before: CheckpointFacts | None, now: CheckpointFacts | None) -> dict[str, Jump]:
    """The tensors whose norm changed tenfold against the others', by more than steps or a beginning at zero explain."""
    if before is None or now is None:
        return {}
    norms = {
        n: (a.facts.norm, b.facts.norm, b)
        for n, (a, b) in weight_pairs(before, now).items()
        if a.facts and b.facts and a.facts.finite and b.facts.finite and a.facts.norm and b.facts.norm
    }
    if len(norms) < 3:
        return {}
    ratios = {n: math.log(b / a) for n, (a, b, _) in norms.items()}
    usual = statistics.median(ratios.values())
    step = _step(before, now)
    found: dict[str, Jump] = {}
    for name, ratio in ratios.items():
        a, b, tensor = norms[name]
        if abs(ratio - usual) < TENFOLD or tensor.numel < 16:
            continue
        size = math.sqrt(tensor.numel)
        reach = abs(b - a) / (step * size) if step else None
        young = a / size < YOUNG if reach is None else reach <= 1
        if ratio > usual and young:
            continue
        found[name] = Jump(tensor, a, b, ratio, usual, reach)
    return found


def _step(before: CheckpointFacts, now: CheckpointFacts) -> float | None:
    """How far an adaptive optimizer usually carries a number from one checkpoint to the other: rate times steps."""
    rates = [*_rates(before), *_rates(now)]
    steps = abs((reached_step(now) or 0) - (reached_step(before) or 0))
    adaptive = any("betas" in g.options for o in now.state.optimizers for g in o.groups)
    return max(rates) * steps if adaptive and rates and max(rates) > 0 and steps else None


def _rates(facts: CheckpointFacts) -> Iterator[float]:
    options: list[Mapping[str, object]] = [g.options for o in facts.state.optimizers for g in o.groups]
    for group in options:
        yield from (v for k in ("lr", "initial_lr") if (v := number(group.get(k))) is not None)
    for scheduler in facts.state.schedulers:
        yield from (v for r in scheduler.values.get("base_lrs") or () if (v := number(r)) is not None)


CHECK = WeightJumps()

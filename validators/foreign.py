from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Finding, LogRow
from ckptguard.ports import RunSubject

SAME_COPY = 120.0  # seconds within which the times of a copied tree lie


@dataclass(frozen=True, slots=True)
class Stranger:
    """A checkpoint of another run. `older`: it was written before the run that is here, so it is not to be resumed from."""

    path: str
    why: str
    older: bool


class Foreign:
    """Checkpoints of another run in the same directory.

    Finds: checkpoints whose own logs disagree on the steps that both have behind them, and checkpoints of steps that the
    run's log never reached, older than one that it did reach.
    Why it matters: rotation and "latest" go by number: the old run's higher numbers win, and the new run's saves go.
    Example: a second run started in an output directory that still holds checkpoint-500 of the first.
    What to do: move the other run's checkpoints away.
    Blind spots: layouts that keep no log inside their checkpoints, in a run without a log of its own. Where the times do
    not tell which run is the older one (a copied tree), the higher steps stay the newest.
    """

    name = "foreign"
    codes = ("foreign-checkpoint",)

    def run(self, subject: RunSubject) -> Iterator[Finding]:
        for stranger in strangers(subject.facts, subject.log):
            yield finding("foreign-checkpoint", stranger.path, stranger.why)


def strangers(facts: Sequence[CheckpointFacts], log: Sequence[LogRow]) -> Iterator[Stranger]:
    """The checkpoints that are not of the run that saved last."""
    found: set[str] = set()
    logged = sorted((f for f in facts if f.state.log), key=lambda f: f.manifest.modified)
    for other in logged[:-1]:
        newest = logged[-1]
        if other.manifest.layout == newest.manifest.layout and _disagree(other, newest):
            found.add(other.path)
            yield Stranger(
                other.path,
                f"{other.path} and {newest.path} logged other losses for the same steps: they are of two runs",
                _before(other, newest),
            )
    reached = max((row.step for row in log), default=None)
    for one in facts:
        if one.path in found or reached is None or one.step is None or one.step <= reached:
            continue
        witness = next(
            (
                f
                for f in facts
                if f.step is not None
                and f.step <= reached
                and f.manifest.layout == one.manifest.layout
                and f.manifest.series == one.manifest.series
                and _before(one, f)
            ),
            None,
        )
        if witness is not None:
            yield Stranger(
                one.path,
                f"{one.path} is of step {one.step} and older than {witness.path}; the run's log ends at step {reached}",
                True,
            )


def _before(one: CheckpointFacts, two: CheckpointFacts) -> bool:
    return one.manifest.modified < two.manifest.modified - SAME_COPY


def _disagree(one: CheckpointFacts, two: CheckpointFacts) -> bool:
    mine = {r.step: r.loss for r in one.state.log if r.loss is not None}
    theirs = {r.step: r.loss for r in two.state.log if r.loss is not None}
    common = mine.keys() & theirs.keys()
    different = sum(mine[s] != theirs[s] for s in common)
    return len(common) >= 3 and different > len(common) / 2


RUN_CHECK = Foreign()

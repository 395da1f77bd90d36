from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Finding
from ckptguard.ports import RunSubject


class Foreign:
    """Checkpoints of another run in the same directory.

    Finds: checkpoints whose own logs disagree on the steps that both have behind them.
    Why it matters: rotation and "latest" go by number: the old run's higher numbers win, and the new run's saves go.
    Example: a second run started in an output directory that still holds checkpoint-500 of the first.
    What to do: move the other run's checkpoints away.
    Blind spots: layouts that keep no log inside their checkpoints.
    """

    name = "foreign"
    codes = ("foreign-checkpoint",)

    def run(self, subject: RunSubject) -> Iterator[Finding]:
        logged = sorted((f for f in subject.facts if f.state.log), key=lambda f: f.manifest.modified)
        if len(logged) < 2:
            return
        newest = logged[-1]
        for other in logged[:-1]:
            if other.manifest.layout == newest.manifest.layout and _disagree(other, newest):
                yield finding(
                    "foreign-checkpoint",
                    other.path,
                    f"{other.path} and {newest.path} logged other losses for the same steps: they are of two runs",
                )


def _disagree(one: CheckpointFacts, two: CheckpointFacts) -> bool:
    mine = {r.step: r.loss for r in one.state.log if r.loss is not None}
    theirs = {r.step: r.loss for r in two.state.log if r.loss is not None}
    common = mine.keys() & theirs.keys()
    different = sum(mine[s] != theirs[s] for s in common)
    return len(common) >= 3 and different > len(common) / 2


RUN_CHECK = Foreign()

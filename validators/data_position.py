from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding, LoaderState
from ckptguard.ports import Subject
from ckptguard.validators._base import close, comparable, stated_step

POSITIONS = (
    "_num_yielded", "samples_yielded", "yielded", "position", "batches_seen", "batch_idx", "num_batches", "consumed_samples",
    "samples_seen", "_sampler_iter_yielded", "sample_in_epoch", "cursor", "offset", "num_batches_fetched", "_snapshot_step",
)  # fmt: skip


class DataPosition:
    """Whether the data loader stands where the step says it should.

    Finds: positions that did not move with the steps since the checkpoint before, and single ranks that stand where they
    stood in an earlier checkpoint.
    Why it matters: batches are trained on twice, or never; no curve shows it.
    Example: a loader state that was saved once at the start of the epoch and never again.
    What to do: resume from a checkpoint whose position fits, or set the position by hand.
    Blind spots: the first checkpoint of a run, positions across an epoch's end, loaders without a readable position.
    """

    name = "data-position"
    needs = Evidence.STRUCTURE
    codes = ("data-position-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        step, epoch = stated_step(facts), _epoch(facts)
        if step is None:
            return
        yield from self._ranks(subject)
        for loader in facts.state.loaders:
            expected = self._expected(subject, loader, step, epoch)
            for name, (found, want) in expected.items():
                if found == want:
                    continue
                yield finding(
                    "data-position-mismatch",
                    loader.subject,
                    f"{name} is {found} at step {step}; going by the run's other checkpoints it should be {want}",
                )
                break

    @staticmethod
    def _ranks(subject: Subject) -> Iterator[Finding]:
        """Data-parallel ranks take a batch each a step; one that begins anew before the others had less to read."""
        mine = strays(subject.facts.state.loaders)
        step = stated_step(subject.facts) or 0
        for sibling in comparable(subject) if mine else ():
            earlier = (stated_step(sibling) or step) < step and not strays(sibling.state.loaders)
            theirs = {x.rank: positions(x.values) for x in sibling.state.loaders} if earlier else {}
            stale = [s for s in mine if theirs.get(s[0].rank) == positions(s[0].values)]
            for loader, name, found, usual in stale:
                yield finding(
                    "data-position-mismatch",
                    loader.subject,
                    f"{name} of rank {loader.rank} is {found}, as in {sibling.path}; of the other ranks it is {usual}",
                )
            if stale:
                return

    @staticmethod
    def _expected(
        subject: Subject, loader: LoaderState, step: int, epoch: int | None
    ) -> dict[str, tuple[int, int]]:
        """(found, expected) of each position, where another checkpoint of the same epoch gives the pace."""
        mine = positions(loader.values)
        result = {}
        for sibling in comparable(subject):
            other_step = stated_step(sibling)
            if other_step is None or other_step >= step or _epoch(sibling) != epoch or epoch is None:
                continue
            twin = next((x for x in sibling.state.loaders if x.rank == loader.rank), None)
            theirs = positions(twin.values) if twin else {}
            for name, found in mine.items():
                before = theirs.get(name)
                if before is not None and _one_pace((other_step, before), (step, found)):
                    continue
                pace = _pace(subject, name, loader.rank, epoch, other_step, before)
                if before is not None and pace is not None:
                    want = before + pace * (step - other_step)
                    if close(want, round(want)):
                        result[name] = (found, round(want))
        return result


def _one_pace(one: tuple[int, int], two: tuple[int, int]) -> bool:
    """Whether both positions are a whole pace times their steps, off by the same part of a step (saved before the count)."""
    (step, position), (later, found) = one, two
    pace = round(found / later) if later else 0
    offset = found - pace * later
    return pace > 0 and offset == position - pace * step and abs(offset) <= pace


def _pace(
    subject: Subject, name: str, rank: int | None, epoch: int, step: int, position: int | None
) -> float | None:
    """Batches or samples a step: from two earlier checkpoints of the epoch, or from its beginning in epoch 0."""
    if position is None:
        return None
    if epoch == 0 and step > 0:
        return position / step
    pairs = sorted(
        (s_step, p)
        for s in comparable(subject)
        if _epoch(s) == epoch
        and (s_step := stated_step(s)) is not None
        and (twin := next((x for x in s.state.loaders if x.rank == rank), None)) is not None
        and (p := positions(twin.values).get(name)) is not None
    )
    if len(pairs) < 2 or pairs[-1][0] == pairs[0][0]:
        return None
    pace: float = (pairs[-1][1] - pairs[0][1]) / (pairs[-1][0] - pairs[0][0])
    return pace


def strays(loaders: Sequence[LoaderState]) -> list[tuple[LoaderState, str, int, int]]:
    """(loader, counter, its value, the others') of every rank that is more than a batch away from where most ranks are."""
    ranked = [(x, positions(x.values)) for x in loaders if x.rank is not None]
    if len(ranked) < 2:
        return []
    found = []
    for name in set.intersection(*(set(p) for _, p in ranked)):
        if name.rpartition(".")[2] != "_num_yielded":
            continue  # counts batches, whatever their size
        values = [p[name] for _, p in ranked]
        usual = max(values, key=lambda v: (values.count(v), v))
        found += [(x, name, p[name], usual) for x, p in ranked if abs(p[name] - usual) > 1]
    return found


def positions(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, int]:
    """Every counter of a loader's state that tells how far it is, by its path."""
    found: dict[str, int] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, int) and not isinstance(value, bool) and key in POSITIONS:
            found[name] = value
        elif isinstance(value, dict) and depth < 6:
            found |= positions(value, f"{name}.", depth + 1)
    return found


def _epoch(facts: CheckpointFacts) -> int | None:
    return next((c.value for c in facts.state.counters if c.unit == "epoch"), None)


CHECK = DataPosition()

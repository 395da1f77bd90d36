from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ckptguard.codes import finding
from ckptguard.layouts._ranks import RANK_PARTS, RankPart
from ckptguard.model import CheckpointFacts, Evidence, Finding, Tensor
from ckptguard.ports import Store, Subject
from ckptguard.validators._base import comparable, number, optimizer_steps, stated_step
from ckptguard.validators._values import numbers

LEAST = 16  # numbers that tell one part from another
NUMBERS = 4096  # of each rank, compared with the checkpoint before
MOST_RANKS = 64
MOST_REMOTE = 16  # ranks, where each read is a request
NEARER = 10.0  # times that a part must be nearer to another rank's than to its own
FARTHER = (
    10.0  # times that a part must have moved farther than all others', and than its optimizer's steps go
)


class RankParts:
    """Whether every rank's file holds that rank's own part of what is cut over the ranks.

    Finds: two ranks' files with the same part, files that changed places, a rank's part that is that of an earlier
    checkpoint though the others' moved on, or that no steps lead to from there, and parts that are all zero.
    Why it matters: partitions are flat and nameless: they load, and each rank goes on with numbers that belong elsewhere.
    Example: one node's files copied over another's after a restore from a backup.
    What to do: take the file from the node that wrote it or from a replica, else resume from the checkpoint before.
    Blind spots: files that changed places in a run's first checkpoint; parts that training does not change.
    """

    name = "rank-parts"
    needs = Evidence.CONTENT
    codes = ("missing-rank", "mixed-saves", "topology-mismatch", "zero-weights")

    def run(self, subject: Subject) -> Iterator[Finding]:
        for what, parts in groups(subject.facts).items():
            siblings = [theirs for s in comparable(subject) if (theirs := groups(s).get(what))]
            yield from _copies(what, parts, siblings)
            if (stated_step(subject.facts) or 0) > 1:  # a warm-up's first step has a rate of zero
                yield from _zeros(what, parts)
            yield from self._borrowed(subject, what, parts)
            yield from self._swapped(subject, what, parts)

    @staticmethod
    def _borrowed(subject: Subject, what: str, parts: Sequence[RankPart]) -> Iterator[Finding]:
        mine = stated_step(subject.facts)
        for sibling in comparable(subject):
            step = stated_step(sibling)
            theirs = {p.rank: p for p in groups(sibling).get(what, ())}
            if mine is None or step is None or step >= mine or len(theirs) != len(parts):
                continue
            for kind in ("weights", "moments"):
                same = [p for p in parts if _is_same(p, theirs.get(p.rank), kind)]
                if same and len(same) < len(parts):
                    yield finding(
                        "mixed-saves",
                        same[0].file,
                        f"{same[0].file}: its part of {what} has the {kind} of {sibling.path}, bit for bit; other ranks' moved on",
                    )
                    return

    @staticmethod
    def _swapped(subject: Subject, what: str, parts: Sequence[RankPart]) -> Iterator[Finding]:
        before, store = subject.previous, subject.store
        if before is None or store is None or before not in comparable(subject):
            return
        theirs = groups(before).get(what, [])
        most = MOST_REMOTE if store.traits.request_bytes else MOST_RANKS
        if [p.rank for p in theirs] != [p.rank for p in parts] or len(parts) > most:
            return
        now, then = _numbers(store, subject.facts, parts), _numbers(store, before, theirs)
        yield from _foreign(subject.facts, before, parts, now, then)
        for place, rank in sorted(moved(now, then).items()):
            part = next(p for p in parts if p.rank == place)
            yield finding(
                "topology-mismatch",
                part.file,
                f"{part.file} holds the part of {what} that rank {rank} had in {before.path}, not that of rank {place}",
            )


def groups(facts: CheckpointFacts) -> dict[str, list[RankPart]]:
    """The parts of everything that is cut over two ranks or more, by rank."""
    found: dict[str, list[RankPart]] = defaultdict(list)
    for part in facts.state.attributes.get(RANK_PARTS, ()):
        found[part.what].append(part)
    return {
        what: sorted(parts, key=lambda p: p.rank)
        for what, parts in found.items()
        if len({p.rank for p in parts}) == len(parts) > 1
    }


def _print(part: RankPart) -> tuple[str, ...]:
    """What tells a part from any other: its digests; () where they are not known or every part may look so."""
    tensors = [*part.weights, *part.moments, *part.second]
    if any(t.facts is None for t in tensors if t.numel):
        return ()
    telling = sum(
        t.numel for t in tensors if t.facts is not None and t.facts.minimum != t.facts.maximum and t.numel > 1
    )
    return tuple(t.facts.digest for t in tensors if t.facts is not None) if telling >= LEAST else ()


def copies(parts: Sequence[RankPart]) -> list[tuple[RankPart, RankPart]]:
    """(part, the earlier one that it is a copy of). Whole sets of replicas are no copies: ranks that hold the same by design."""
    seen: dict[tuple[str, ...], list[RankPart]] = defaultdict(list)
    for part in parts:
        seen[_print(part) or ("", part.file)].append(part)
    sizes = {len(members) for members in seen.values()}
    if len(seen) > 1 and sizes != {1} and len(sizes) == 1:
        return []
    return [(twin, members[0]) for members in seen.values() for twin in members[1:]]


def _copies(
    what: str, parts: Sequence[RankPart], siblings: Sequence[Sequence[RankPart]]
) -> Iterator[Finding]:
    if any(copies(theirs) for theirs in siblings):
        return  # the run's other checkpoints look so too
    for twin, first in copies(parts):
        yield finding(
            "missing-rank",
            twin.file,
            f"{twin.file} holds bit for bit the part of {what} that {first.file} holds: that of one of the two ranks is not there",
        )


def _zeros(what: str, parts: Sequence[RankPart]) -> Iterator[Finding]:
    """All weights zero under moments that are not; a rank with nothing but fresh adapters has neither."""
    empty = [p for p in parts if _zero(p.weights) and _zero(p.moments) is False]
    if not any(_zero(p.weights) is False for p in parts):
        return
    for part in empty:
        numel = sum(t.numel for t in part.weights)
        if numel >= LEAST:
            yield finding(
                "zero-weights",
                part.file,
                f"all {numel} numbers of {what} in {part.file} are zero; their optimizer moments are not",
            )


def _zero(tensors: Sequence[Tensor]) -> bool | None:
    """Whether all numbers are zero; None where nothing tells."""
    known = [t.facts for t in tensors if t.numel]
    if not known or any(f is None for f in known):
        return None
    return all(f.zeros for f in known if f is not None)


def _is_same(part: RankPart, other: RankPart | None, kind: str) -> bool:
    """Whether a rank's weights, or its moments, are those of another checkpoint though the optimizer moves all of them."""
    if other is None or _zero(part.moments) is not False:
        return False
    mine, theirs = (part.weights, other.weights) if kind == "weights" else (part.moments, other.moments)
    if sum(t.numel for t in part.moments) < sum(t.numel for t in part.weights):
        return False  # some of it is frozen
    if not mine or len(mine) != len(theirs) or sum(t.numel for t in mine) < LEAST:
        return False
    return all(
        a.facts is not None and b.facts is not None and a.facts.digest == b.facts.digest
        for a, b in zip(mine, theirs)
    )


def _numbers(store: Store, facts: CheckpointFacts, parts: Sequence[RankPart]) -> dict[int, np.ndarray]:
    """Numbers of each rank's largest weights (the second moments, where it holds no weights), which move slowly."""
    found = {}
    for part in parts:
        tensors = part.weights or part.second
        if not tensors:
            continue
        place = max(range(len(tensors)), key=lambda i: tensors[i].numel)
        values = numbers(store, facts, tensors[place], 0, NUMBERS)
        if values is not None and values.size >= LEAST and np.isfinite(values).all():
            found[part.rank] = values
    return found


def _foreign(
    facts: CheckpointFacts,
    before: CheckpointFacts,
    parts: Sequence[RankPart],
    now: Mapping[int, np.ndarray],
    then: Mapping[int, np.ndarray],
) -> Iterator[Finding]:
    """The one rank whose weights are farther from the checkpoint before than any steps lead."""
    reach = _reach(before, facts)
    away = {
        p.rank: _apart(now[p.rank], then[p.rank])
        for p in parts
        if p.weights and p.rank in now and p.rank in then and now[p.rank].shape == then[p.rank].shape
    }
    if reach is None or len(away) != len(parts):
        return
    far = max(away, key=away.__getitem__)
    rest = max(distance for rank, distance in away.items() if rank != far)
    if away[far] > FARTHER * max(rest, reach):
        part = next(p for p in parts if p.rank == far)
        yield finding(
            "mixed-saves",
            part.file,
            f"the numbers of {part.what} in {part.file} are {away[far]:.3g} away from those in {before.path}, other ranks' {rest:.3g} at most, and the learning rate carries them about {reach:.3g}: they are of another training",
        )


def _reach(before: CheckpointFacts, now: CheckpointFacts) -> float | None:
    """How far an adaptive optimizer carries a number between two checkpoints: its rate a step (Kingma & Ba 2015, section 2.1)."""
    groups = [g.options for s in (before, now) for o in s.state.optimizers for g in o.groups]
    planned = [r for s in (before, now) for p in s.state.schedulers for r in p.values.get("base_lrs") or ()]
    rates = [rate for g in groups for key in ("lr", "initial_lr") if (rate := number(g.get(key))) is not None]
    rates += [rate for value in planned if (rate := number(value)) is not None]
    counts = [[n for o in s.state.optimizers for n in optimizer_steps(o)] for s in (before, now)]
    # A step of the training may be many of the optimizer.
    steps = max(counts[1]) - max(counts[0]) if all(counts) else 0
    adaptive = bool(groups) and all("betas" in g for g in groups)
    return max(rates) * steps if adaptive and rates and max(rates) > 0 and steps > 0 else None


def _apart(one: np.ndarray, two: np.ndarray) -> float:
    """How far two parts are from one another. Few numbers may be anything: ZeRO-3 never fills the padding of its parts."""
    return float(np.median(np.abs(one - two)))


def moved(now: Mapping[int, np.ndarray], then: Mapping[int, np.ndarray]) -> dict[int, int]:
    """Ranks whose numbers are far nearer to those that another rank had than to their own: rank -> that other one."""
    found = {}
    for rank, mine in now.items():
        own = then.get(rank)
        if own is None:
            continue
        apart = {other: _apart(mine, theirs) for other, theirs in then.items() if theirs.shape == mine.shape}
        nearest = min(apart, key=apart.__getitem__, default=rank)
        distance = apart.get(rank, _apart(mine, np.zeros_like(mine)))
        if nearest != rank and apart[nearest] * NEARER < distance:
            found[rank] = nearest
    return found


CHECK = RankParts()

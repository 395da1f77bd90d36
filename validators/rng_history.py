from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding, Tensor
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, reached_step

Streams = dict[tuple[int | None, str], str]


class RngHistory:
    """Random-generator states that are still those of the checkpoint before.

    Finds: all generator states of a process bitwise equal to the checkpoint before, in a run that draws from them at
    every step (it has dropout, or they moved elsewhere within an epoch, or they moved in all other intervals).
    Why it matters: dropout masks and sampled data of the steps before come again; no curve shows it.
    Example: an rng_state.pth that a save into a used directory did not replace.
    What to do: resume from the checkpoint before where the exact continuation matters.
    Blind spots: runs that draw rarely, or that have two checkpoints and no dropout; states of another, later step.
    """

    name = "rng-history"
    needs = Evidence.STRUCTURE
    codes = ("rng-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts, before = subject.facts, subject.previous
        if before is None or before not in comparable(subject):
            return
        then, now = _streams(before), _streams(facts)
        for rng in facts.state.rngs:
            mine = {k: v for k, v in now.items() if k[0] == rng.rank}
            if not mine or any(then.get(k) != v for k, v in mine.items()):
                continue
            if _has_dropout(facts.state.config) or self._draws(subject, rng.rank):
                yield finding(
                    "rng-mismatch",
                    rng.subject,
                    f"the generator states in {rng.subject} are those of {before.path}, bit for bit, though {(facts.step or 0) - (before.step or 0)} steps passed",
                )

    @staticmethod
    def _draws(subject: Subject, rank: int | None) -> bool:
        """Whether the run's other intervals show that every step draws."""
        run = sorted((subject.facts, *comparable(subject)), key=lambda s: reached_step(s) or 0)
        moved, inside = [], []
        for one, two in pairwise(run):
            a, b = _streams(one), _streams(two)
            common = [k for k in a if k in b and k[0] == rank]
            if two is subject.facts or not common:
                continue
            moved.append(any(a[k] != b[k] for k in common))
            inside.append(not _ends_an_epoch(one) and _epoch(one) is not None and _epoch(one) == _epoch(two))
        if not all(moved):
            return False  # a run that draws at an epoch's beginning, or at a restart, and not at every step
        # What moved once within an epoch is drawn from at every step, unless the config says that nothing draws there.
        return len(moved) > 1 or (any(inside) and subject.facts.state.config is None)


def _streams(facts: CheckpointFacts) -> Streams:
    """A short form of every generator's state, by rank and name; those that were not read are left out."""
    found: Streams = {}
    for rng in facts.state.rngs:
        for name, value in rng.streams.items():
            form = _form(value)
            if form is not None:
                found[rng.rank, name] = form
    return found


def _form(value: Any) -> str | None:
    if isinstance(value, Tensor):
        if value.value is None:
            return value.facts.digest if value.facts is not None else None
        value = np.asarray(value.value)
    if isinstance(value, np.ndarray):
        return str(hash(value.tobytes()))
    if isinstance(value, tuple | list):
        forms = [_form(v) for v in value]
        return None if None in forms else str(forms)
    return repr(value) if isinstance(value, int | float | str | bytes) or value is None else None


def _has_dropout(config: Mapping[str, Any] | None) -> bool:
    """Whether the model's config names a dropout that is on: then every training step draws."""
    return any(
        ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float) and 0 < value < 1
        for key, value in (config or {}).items()
        if not key.startswith(("classifier", "summary"))
    )


def _epoch(facts: CheckpointFacts) -> int | None:
    counted = next((c.value for c in facts.state.counters if c.unit == "epoch"), None)
    epoch = facts.state.attributes.get("epoch")
    return int(epoch) if counted is None and isinstance(epoch, int | float) else counted


def _ends_an_epoch(facts: CheckpointFacts) -> bool:
    """Whether the next step begins an epoch, which draws the order of its data."""
    epoch = facts.state.attributes.get("epoch")
    return isinstance(epoch, float) and epoch == int(epoch)


CHECK = RngHistory()

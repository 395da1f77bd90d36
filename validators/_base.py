"""What several checks need: words for subjects, relations between counters, siblings that can be compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckptguard.codes import CODES, finding
from ckptguard.layouts._state import strip_wrappers
from ckptguard.model import (
    CheckpointFacts,
    Effect,
    FileFacts,
    Finding,
    OptimizerState,
    Problem,
    Role,
    Severity,
    Tensor,
)
from ckptguard.ports import Subject

EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)\.weight$")
# Names of rank files whose loss costs continuity, not the checkpoint.
LOSSY_RANKS = ("rng_state", "random_states", "dl_state", "dataloader", "extra_state")
SOFT_ROLES = frozenset({Role.TOKENIZER, Role.OTHER})


def from_problem(facts: CheckpointFacts, file: str, problem: Problem) -> Finding:
    """A reader's problem as a finding on FILE or FILE:WHERE."""
    severity = Severity(problem.severity) if problem.severity else None
    effect = Effect(problem.effect) if problem.effect else None
    entry = facts.manifest.file(file)
    soft = entry is not None and (entry.role in SOFT_ROLES or entry.name.endswith("generation_config.json"))
    if soft and severity is None and CODES[problem.code].effect is Effect.UNSAFE:
        severity, effect = Severity.WARNING, Effect.LOSSY
    subject = f"{file}:{problem.where}" if problem.where else file
    return finding(
        problem.code, subject, f"{file}: {problem.message}", problem.hint, severity=severity, effect=effect
    )


def problems(facts: CheckpointFacts, codes: Iterable[str]) -> Iterator[tuple[FileFacts, Problem]]:
    wanted = set(codes)
    for file in facts.files.values():
        for problem in file.problems:
            if problem.code in wanted:
                yield file, problem


def comparable(subject: Subject) -> list[CheckpointFacts]:
    """The other checkpoints of the same layout and series."""
    mine = subject.facts
    return [
        s
        for s in subject.others
        if s.manifest.layout == mine.manifest.layout
        and s.manifest.series == mine.manifest.series
        and not s.manifest.temporary
    ]


def is_broken(facts: CheckpointFacts, roles: Iterable[Role]) -> bool:
    """Whether a file of one of these roles (or one that holds several) could not be read, so that absence proves nothing."""
    wanted = {*roles, Role.BUNDLE, Role.SHARD, Role.METADATA}
    for file in facts.manifest.files:
        known = facts.files.get(file.name)
        if file.role in wanted and known is not None and known.tree is None and known.problems:
            return True
    return False


def optimizer_steps(optimizer: OptimizerState) -> list[float]:
    """Every step counter of an optimizer: per parameter, else per group."""
    found = []
    for state in optimizer.states:
        value = number(state.values.get("step"))
        if value is not None:
            found.append(value)
    if not found:
        found = [v for g in optimizer.groups if (v := number(g.options.get("step"))) is not None]
    return found


# Which optimizers keep a value of this name for each parameter. What several keep is listed last.
_FAMILIES: tuple[tuple[frozenset[str], frozenset[str]], ...] = tuple(
    (frozenset(names.split()), frozenset(families.split()))
    for names, families in (
        ("exp_avg_sq_row", "adafactor"),
        ("exp_avg_sq_col", "adafactor"),
        ("state1 qmap1", "adam8bit"),
        ("state1 absmax1", "adam8bit"),
        ("z exp_avg_sq", "schedulefree"),
        ("exp_inf", "adamax"),
        ("exp_avg exp_avg_sq", "adam"),
        ("square_avg", "rmsprop"),
        ("sum", "adagrad"),
        ("momentum_buffer", "sgd muon"),
        ("exp_avg", "lion"),
    )
)


def state_families(optimizer: OptimizerState) -> frozenset[str]:
    """The optimizers that may have written a state, by the names of its values; empty where they say nothing.

    One that treats matrices and vectors differently (Muon with AdamW) has the families of both.
    """
    found: set[str] = set()
    for state in optimizer.states:
        names = state.values.keys()
        found |= next((families for wanted, families in _FAMILIES if wanted <= names), frozenset())
    return frozenset(found)


def number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Tensor):
        found = value.scalar()
        return None if found is None else float(found)
    return None


def close(a: float, b: float, relative: float = 1e-6) -> bool:
    return a == b or abs(a - b) <= relative * max(abs(a), abs(b))


def shared_offset(offset: int, others: Sequence[int | None]) -> bool:
    """Whether all siblings show the same offset: then it is how the run counts."""
    known = [o for o in others if o is not None]
    return bool(known) and all(o == offset for o in known)


def shared_ratio(ratio: float, others: Sequence[float | None]) -> bool:
    known = [o for o in others if o is not None]
    return bool(known) and all(close(o, ratio, 1e-9) for o in known)


def tensor_of_record(file: FileFacts, record: str) -> str:
    """The tensor that lies in a record of a torch archive, for people who do not think in records."""
    tail = "/".join(record.split("/")[-2:])
    return next(
        (t.name for t in file.tensors if t.storage and (t.storage == tail or t.storage == record)), ""
    )


def own_step(facts: CheckpointFacts) -> int | None:
    """The step that the content states, without the name: of several counters the one that the name agrees with."""
    stated = [c.value for c in facts.state.counters if c.unit == "step" and c.name != "name"]
    if facts.manifest.step in stated:
        return facts.manifest.step
    return next(iter(stated), None)


def stated_step(facts: CheckpointFacts) -> int | None:
    """The step of the content, else of the name, where its number is one of steps and not of epochs."""
    own = own_step(facts)
    if own is not None:
        return own
    named = next((c for c in facts.state.counters if c.name == "name"), None)
    return None if named is not None and named.unit == "epoch" else facts.manifest.step


def reached_step(facts: CheckpointFacts) -> int | None:
    """How far the training was: the stated step, else the optimizer's own count of a loop that states epochs only."""
    stated = stated_step(facts)
    return stated if stated is not None else facts.step


def weight_pairs(before: CheckpointFacts, now: CheckpointFacts) -> dict[str, tuple[Tensor, Tensor]]:
    """The weights of two checkpoints that have name and shape in common, by the later one's names."""
    old = {strip_wrappers(n): t for n, t in before.state.model.items()}
    return {
        n: (old[k], t)
        for n, t in now.state.model.items()
        if (k := strip_wrappers(n)) in old
        and t.dtype.startswith(("float", "bfloat"))
        and t.numel > 1
        and old[k].shape == t.shape
    }

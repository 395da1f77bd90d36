"""The straight line: target → store → manifests → facts → findings → verdicts. Reads only; all effects are elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptguard.discover import group_runs
from ckptguard.errors import KeyNotFound, NothingRecognised, TargetNotFound, TimedOut
from ckptguard.facts import Progress, Reader
from ckptguard.judge import is_copy, natural, newest_first, resume_from
from ckptguard.look import Look, find_pointers, split_leftovers
from ckptguard.model import CheckpointFacts, Effect, Evidence, Finding, Manifest, Resume, RunReport, Verdict
from ckptguard.ports import Store
from ckptguard.targets import Opened, Options, open_target
from ckptguard.unmoved import unmoved_weights

__all__ = [
    "Decision",
    "Look",
    "Opened",
    "Options",
    "audit",
    "find_pointers",
    "open_target",
    "preflight",
    "split_leftovers",
]

NEIGHBOURS = 16  # on each side


@dataclass(frozen=True, slots=True)
class Decision:
    """What preflight decides. `resume_from` is None unless `decision` is "resume"."""

    decision: str
    resume_from: str | None
    report: RunReport | None
    reasons: tuple[str, ...] = ()


def audit(
    target: str, options: Options | None = None, progress: Progress | None = None
) -> tuple[RunReport, ...]:
    """Find and judge every checkpoint under a target; one report a run.

    Raises TargetNotFound, NothingRecognised, UsageError, StoreError.
    """
    options = options or Options()
    opened, directory, manifests = open_target(target, options)
    reports = []
    with Reader(opened.store, options.jobs, progress) as reader:
        for run in group_runs(directory, manifests):
            if opened.only is not None and all(m.path != opened.only for m in run.checkpoints):
                continue
            look = Look(opened, run, options, reader)
            facts = [f for m in list(look.manifests) if (f := look.read_enough(m)) is not None]
            facts.sort(key=lambda f: -1 if f.step is None else f.step)
            pairs = [(f, look.verdict(f, neighbours(facts, i))) for i, f in enumerate(facts)]
            if pairs or look.leftovers:
                reports.append(look.report(target, pairs))
    if not reports:
        raise NothingRecognised(
            f"{target}: nothing here is recognised as a checkpoint",
            "name the directory that holds the checkpoints, or a checkpoint itself",
        )
    return tuple(reports)


def neighbours(facts: Sequence[CheckpointFacts], at: int) -> Sequence[CheckpointFacts]:
    """The checkpoints that one is compared with, in order of their steps, itself included.

    What a run's checkpoints have in common shows in a few dozen of them; all of a thousand would take a million
    comparisons.
    """
    return facts[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1]


def preflight(target: str, options: Options | None = None, progress: Progress | None = None) -> Decision:
    """Decide from where to resume, newest first, and stop as soon as that is certain. Fails closed.

    Of a checkpoint that is named itself it only says whether to resume from that one. Raises TargetNotFound,
    NothingRecognised, UsageError, StoreError.
    """
    options = options or Options(grace=0.0)
    opened, directory, manifests = open_target(target, options)
    runs = group_runs(directory, manifests)
    if opened.only is not None:
        # A file or directory was named that is no run: nothing of what lies beside it may be chosen in its place.
        runs = [run for run in runs if any(m.path == opened.only for m in run.checkpoints)]
        if not runs:
            raise NothingRecognised(
                f"{target} is neither a run nor a checkpoint", "name the directory that holds the checkpoints"
            )
    if not runs:
        if has_history(opened.store):
            return Decision(
                "stop", None, None, ("no checkpoint is left here, but the run is known to have had some",)
            )
        return Decision("fresh", None, None, ("no checkpoint was ever seen here",))
    with Reader(opened.store, options.jobs, progress) as reader:
        looks = [Look(opened, run, options, reader) for run in runs]
        look = max(looks, key=lambda x: max((m.step or -1 for m in x.manifests), default=-1))
        decision = _decide(target, look, options)
    others = sum(any(m.step is not None for m in x.manifests) for x in looks if x is not look)
    if not others:
        return decision
    choice = f"{others + 1} runs lie under {target}: the answer is of the one that came furthest; name a run to ask about it"
    return replace(decision, reasons=(*decision.reasons, choice))


def _decide(target: str, look: Look, options: Options) -> Decision:
    order = _newest_first(look)
    pairs: list[tuple[CheckpointFacts | None, Verdict]] = []
    chosen: Verdict | None = None
    for manifest in order:
        if look.opened.only not in (None, manifest.path):
            continue
        facts = look.read_enough(manifest)
        if facts is None:
            continue
        verdict = look.verdict(facts, [facts])
        siblings: list[CheckpointFacts] = []
        unmoved: list[Finding] = []
        if verdict.resume.safe:
            before = _sound_before(look, order, manifest)
            # Weights that are those of the checkpoint before did not train.
            unmoved = [f for b in before for f in unmoved_weights(look.subject(facts, [facts, b]), b)]
            if verdict.resume is Resume.EXACT:
                # What only the checkpoint before has (a scaler, averages, other names) was lost since.
                verdict = look.verdict(facts, [facts, *before], unmoved)
        if verdict.resume is Resume.LOSSY:
            # Alone, a checkpoint cannot tell what it lost from what its run never saves.
            siblings = [s for m in order if (s := look.read(m, Evidence.STRUCTURE)) is not None]
            verdict = look.verdict(facts, siblings, unmoved)
        pairs.append((facts, verdict))
        if (
            verdict.resume is Resume.UNKNOWN
            and options.deadline is not None
            and options.now() > options.deadline
        ):
            # An older one must not be chosen because the time did not suffice for this one.
            raise TimedOut(
                f"{target}: the time limit was reached while {verdict.path} was looked at",
                "give it more time (--timeout), or less to do: --depth structure, or --max-age with recorded verdicts",
            )
        chosen = resume_from(
            look.of_this_run([facts, *_saved_last(look, order, manifest)], [verdict]),
            allow_lossy=options.allow_lossy,
            siblings=[s.state.components for s in siblings],
        )
        if chosen is not None:
            break
    seen = {f.path for f, _ in pairs if f is not None}
    pairs += [(None, look.unlooked(m)) for m in look.manifests if m.path not in seen]
    report = look.report(target, pairs)
    if chosen is None:
        if not look.manifests and not look.leftovers and not has_history(look.opened.store):
            return Decision("fresh", None, report, ("no checkpoint was ever seen here",))
        return Decision("stop", None, replace(report, resume_from=None), tuple(passed_over(report)))
    report = replace(report, resume_from=chosen.path)
    return Decision("resume", chosen.path, report, (*passed_over(report), *launch_losses(chosen)))


def _newest_first(look: Look) -> list[Manifest]:
    """The run's checkpoints as audit orders them: by the step, which is in the content where the name does not say it."""

    def sort(steps: Mapping[str, int | None]) -> list[Manifest]:
        # A conversion (DeepSpeed's universal form) comes after the save that it was made of: not every launch can load it.
        def key(m: Manifest) -> tuple[object, ...]:
            step = steps.get(m.path, m.step)
            whole = not m.attributes.get("conversion")
            return step is not None, step or 0, whole, not is_copy(m.path), m.modified, natural(m.path)

        return sorted(look.manifests, key=key, reverse=True)

    def read(manifests: Iterable[Manifest]) -> dict[str, int | None]:
        facts = {m.path: look.read(m, Evidence.STRUCTURE) for m in manifests}
        return {path: f.step for path, f in facts.items() if f is not None}

    if look.options.depth is Evidence.LISTING or len(look.manifests) < 2:
        return sort({})
    by_name = sort({})
    numbered = next((m for m in by_name if m.step is not None), None)
    steps = read([numbered] if numbered else [])
    if numbered is not None and steps.get(numbered.path, numbered.step) != numbered.step:
        return sort(read(by_name))  # the numbers in the names are no steps: epochs, most likely
    return sort({**steps, **read(m for m in by_name if m.step is None)})


def _sound_before(look: Look, order: Sequence[Manifest], manifest: Manifest) -> list[CheckpointFacts]:
    """The structure of the nearest earlier checkpoint of the series that is not unsafe by itself, if there is one."""
    for other in order[order.index(manifest) + 1 :]:
        if other.series != manifest.series or other.temporary:
            continue
        facts = look.read(other, Evidence.STRUCTURE)
        if facts is not None and look.verdict(facts, [facts]).resume is not Resume.UNSAFE:
            return [facts]
    return []


def _saved_last(look: Look, order: Sequence[Manifest], manifest: Manifest) -> list[CheckpointFacts]:
    """The structure of the checkpoint that was written last, where that is another one: it is of the run that is here."""
    last = max((m for m in order if not m.temporary), key=lambda m: m.modified, default=manifest)
    if last.modified <= manifest.modified:
        return []
    facts = look.read(last, Evidence.STRUCTURE)
    return [] if facts is None else [facts]


def passed_over(report: RunReport) -> list[str]:
    """Why each newer checkpoint was not chosen, newest first."""
    reasons = []
    for verdict in newest_first(report.checkpoints):
        if verdict.path == report.resume_from:
            break
        if verdict.evidence is Evidence.LISTING:
            continue
        worst = [f for f in verdict.findings if f.effect > Effect.NONE] or list(verdict.findings)
        worst += [f for f in report.findings if f.code == "foreign-checkpoint" and f.subject == verdict.path]
        words = "; ".join(f"{f.code}: {f.message}" for f in worst[:3])
        reasons.append(f"{verdict.path} is {verdict.resume}: {words}")
    return reasons


def launch_losses(chosen: Verdict) -> list[str]:
    """What the planned launch would lose of the checkpoint that is resumed from."""
    return [f"{chosen.path}: {f.message}" for f in chosen.findings if f.code == "launch-mismatch"]


def has_history(store: Store) -> bool:
    """Whether seals, quarantine or recorded verdicts know of a checkpoint that is not there any more."""
    for folder in ("seals", "quarantine", "verdicts"):
        try:
            if any(e.kind == "file" for e in store.list(f".ckptguard/{folder}")):
                return True
        except (KeyNotFound, TargetNotFound):
            continue
    return False

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptguard.codes import finding
from ckptguard.layouts._state import WRAPPERS, strip_wrappers
from ckptguard.model import CheckpointFacts, Effect, Evidence, Finding, Severity, Tensor
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable


class Names:
    """Names, shapes and dtypes of the weights against the run's checkpoint before.

    Finds: wrapper prefixes that came or went (`module.`, `_orig_mod.`, in any order), tensors that appeared or vanished,
    shapes and dtypes that changed.
    Why it matters: loaders that are not strict skip every name that they do not know and train on from random weights.
    Example: torch.compile switched on for the second half of a run.
    What to do: load with the same wrapper, or strip the prefix from the names.
    Blind spots: the first checkpoint of a run, outside of Hugging Face directories.
    """

    name = "names"
    needs = Evidence.STRUCTURE
    codes = ("names-changed", "shape-mismatch", "dtype-mismatch", "missing-tensor")

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        now = _weights(facts)
        if _all_wrapped(facts, now):
            first = next(iter(now))
            yield finding(
                "names-changed",
                facts.path,
                f"every weight's name has a wrapper's prefix ({first}): the Trainer would load none of them, and say so only in a warning",
            )
            return
        before = subject.previous
        if before is None or before not in comparable(subject) or not now:
            return
        then = _weights(before)
        if not then or _all_wrapped(before, then):
            return
        if now.keys() != then.keys():
            yield from self._keys(subject, set(now), set(then), before.path)
        for name in now.keys() & then.keys():
            if now[name].shape != then[name].shape:
                # Where shards record no whole shape, a tensor that shrank has lost the last of them.
                lost = facts.manifest.attributes.get("format") == "safetensors-shards"
                yield finding(
                    "shape-mismatch",
                    facts.state.subject(now[name]),
                    f"{name} has the shape {list(now[name].shape)}, in {before.path} it has {list(then[name].shape)}",
                    severity=None if lost else Severity.WARNING,
                    effect=None if lost else Effect.LOSSY,
                )
        changed = sorted(n for n in now.keys() & then.keys() if now[n].dtype != then[n].dtype)
        if changed:
            one = changed[0]
            export = _is_export(facts, now)
            yield finding(
                "dtype-mismatch",
                facts.state.subject(now[one]),
                f"{len(changed)} weights changed their dtype since {before.path} ({one}: {then[one].dtype} became {now[one].dtype})"
                + (
                    ": it was exported in one type, without the rest of the training's state"
                    if export
                    else ""
                ),
                severity=Severity.INFO if export else Severity.WARNING,
                effect=Effect.NONE if export else Effect.LOSSY,
            )

    @staticmethod
    def _keys(subject: Subject, now: set[str], then: set[str], before: str) -> Iterator[Finding]:
        facts = subject.facts
        if {strip_wrappers(n) for n in now} == {strip_wrappers(n) for n in then}:
            old, new = sorted(then - now)[0], sorted(now - then)[0]
            yield finding(
                "names-changed",
                facts.path,
                f"{len(now - then)} names changed since {before}: {old} became {new}; shapes did not",
            )
            return
        lost, gained = sorted(then - now), sorted(now - then)
        if lost and not gained:
            yield finding(
                "missing-tensor",
                f"{facts.path}:{lost[0]}",
                f"{len(lost)} of {len(then)} weights of {before} are not there ({', '.join(lost[:3])})",
            )
        else:
            words = f"{len(gained)} weights are new ({', '.join(gained[:2])})" + (
                f", {len(lost)} are gone ({', '.join(lost[:2])})" if lost else ""
            )
            yield finding("names-changed", facts.path, f"since {before} {words}")


def _weights(facts: CheckpointFacts) -> dict[str, Tensor]:
    """The weights by name. FP8 layers' bookkeeping is empty where FP8 is off, and comes and goes with the library."""
    return {n: t for n, t in facts.state.model.items() if t.numel or not n.endswith("_extra_state")}


def _is_export(facts: CheckpointFacts, weights: Mapping[str, Tensor]) -> bool:
    """Whether a run's last save holds the model alone, all of it in one type (torchtitan's export_dtype)."""
    floats = {t.dtype for t in weights.values() if t.dtype.startswith(("float", "bfloat"))}
    return bool(facts.state.attributes.get("model_only")) and len(floats) == 1


def _all_wrapped(facts: CheckpointFacts, weights: Mapping[str, Tensor]) -> bool:
    """Whether the Trainer, which loads by exact names, would find none of them."""
    return (
        facts.manifest.layout == "hf-trainer"
        and bool(weights)
        and all(n.startswith(WRAPPERS) for n in weights)
    )


CHECK = Names()

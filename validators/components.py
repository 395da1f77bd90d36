from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import CheckpointFacts, Evidence, Finding, Role, Severity
from ckptguard.ports import Subject
from ckptguard.validators._base import comparable, is_broken

ROLES = {
    "model": Role.MODEL,
    "optimizer": Role.OPTIMIZER,
    "scheduler": Role.SCHEDULER,
    "rng": Role.RNG,
    "scaler": Role.SCALER,
    "dataloader": Role.DATALOADER,
    "config": Role.CONFIG,
}
SWITCHED_TOGETHER = ("optimizer", "scheduler", "rng")


class Components:
    """Which parts of the training state are there.

    Finds: weights, optimizer, scheduler, RNG, loss scaler, data position or config that this layout normally carries, or
    that the run's other checkpoints carry, and this one does not.
    Why it matters: trainers skip what is absent without a word, and the loss curve does not show it.
    Example: without scheduler.pt the Hugging Face Trainer starts optimizer and schedule afresh, silently.
    What to do: resume from a checkpoint that has everything, or accept the loss: ckptguard preflight RUN --allow-lossy.
    Blind spots: what no checkpoint of the run has is taken as the run's configuration and reported as information.
    """

    name = "components"
    needs = Evidence.STRUCTURE
    codes = (
        "missing-model",
        "missing-optimizer",
        "missing-scheduler",
        "missing-rng",
        "missing-scaler",
        "missing-dataloader",
        "missing-config",
    )

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        siblings = comparable(subject)
        for name, role in ROLES.items():
            if (
                _has(facts, name)
                or is_broken(facts, [role])
                or (facts.manifest.by_role(role) and name != "model")
            ):
                continue
            if name == "model":
                if "model" in facts.manifest.carries:
                    yield finding("missing-model", facts.path, f"{facts.path} holds no model weights")
                continue
            if not self._expected(facts, siblings, name):
                continue
            configured = self._configured(facts, siblings, name)
            yield finding(
                f"missing-{name}",
                facts.path,
                f"{facts.path} has no {_WORDS[name]}{_why(configured)}",
                ""
                if not configured
                else "nothing, if the run is meant to save so; training will not continue exactly",
                severity=Severity.INFO if configured else None,
            )

    @staticmethod
    def _expected(facts: CheckpointFacts, siblings: list[CheckpointFacts], name: str) -> bool:
        if name in facts.manifest.gaps:
            return False
        if (
            facts.state.components.get(name) is None
            and name in facts.state.components
            and name in facts.manifest.carries
        ):
            return False  # the layout says that it does not apply to this checkpoint
        if name in facts.manifest.carries or any(_has(s, name) for s in siblings):
            return True
        if name == "scaler":
            return bool(facts.state.attributes.get("fp16"))
        if name == "scheduler":
            # A scheduler leaves its mark in the optimizer's groups: the rate that it started from.
            return any("initial_lr" in g.options for o in facts.state.optimizers for g in o.groups)
        return False

    @staticmethod
    def _configured(facts: CheckpointFacts, siblings: list[CheckpointFacts], name: str) -> bool:
        manifest, attributes = facts.manifest, facts.state.attributes
        if (
            name in manifest.documented_absent
            or attributes.get("model_only")
            or manifest.attributes.get("weights_only")
        ):
            return True
        if any(_has(s, name) for s in siblings):
            return False
        if len(siblings) >= 2 or manifest.attributes.get("one_file") or manifest.attributes.get("indexed"):
            return True  # out of one file, or one index, nothing can be lost that was in it
        if manifest.attributes.get("own_loop") and name != "optimizer":
            return True  # no convention says that a loop of people's own saves it
        switched = [part for part in SWITCHED_TOGETHER if part in manifest.carries]
        return name in switched and not any(_has(facts, part) for part in switched)


_WORDS = {
    "optimizer": "optimizer state",
    "scheduler": "learning-rate scheduler state",
    "rng": "random-generator state",
    "scaler": "loss-scaler state",
    "dataloader": "data position",
    "config": "config",
}


def _has(facts: CheckpointFacts, name: str) -> bool:
    return facts.state.components.get(name) is True


def _why(configured: bool) -> str:
    return ", as the run is configured" if configured else ", though it should have"


CHECK = Components()

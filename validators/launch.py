from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptguard.codes import finding
from ckptguard.layouts._ranks import PARTITIONS
from ckptguard.model import CheckpointFacts, Effect, Evidence, Finding, Severity
from ckptguard.plan import LaunchPlan
from ckptguard.ports import Subject
from ckptguard.validators._base import state_families

UNIVERSAL = "convert it first: python -m deepspeed.checkpoint.ds_to_universal, then load_universal; or take the weights alone: zero_to_fp32.py"
MODEL_PARALLEL = ("tp", "pp", "ep")


class Launch:
    """Whether the launch that is planned can take this checkpoint, and what it would lose. Runs only where one was given.

    Finds: ZeRO partitions and flat shards cut for another number of data-parallel ranks; formats tied to tensor, pipeline
    or expert parallel sizes launched with others; generator and loader states of ranks that will not be there, or missing
    for ranks that will; fp16 planned without a saved loss scale; another optimizer than the one whose state is saved.
    Why it matters: the job waits for its nodes for hours, and then the load is refused, or the state silently dropped.
    Example: a ZeRO checkpoint of 8 ranks resumed on 16.
    What to do: launch as before, or convert the checkpoint first.
    Blind spots: sizes that neither the files nor the plan state; what the training code does on its own to reshard.
    """

    name = "launch"
    needs = Evidence.STRUCTURE
    codes = ("launch-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        plan = subject.plan
        if not isinstance(plan, LaunchPlan):
            return
        yield from _partitions(subject.facts, plan)
        yield from _tied(subject.facts, plan)
        yield from _generators(subject.facts, plan)
        yield from _loaders(subject.facts, plan)
        yield from _precision(subject.facts, plan)
        yield from _optimizer(subject.facts, plan)


def _refuse(subject: str, message: str, hint: str) -> Finding:
    return finding("launch-mismatch", subject, message, hint, severity=Severity.ERROR, effect=Effect.UNSAFE)


def _lose(subject: str, message: str, hint: str) -> Finding:
    return finding("launch-mismatch", subject, message, hint, severity=Severity.WARNING, effect=Effect.LOSSY)


# --- what cannot be loaded at all ---------------------------------------------------------------------


def _partitions(facts: CheckpointFacts, plan: LaunchPlan) -> Iterator[Finding]:
    """Optimizer state that was flattened and cut over the data-parallel ranks."""
    if _is(facts, "universal"):
        return
    cut = [o for o in facts.state.optimizers if o.sharded and o.rank is not None]
    if not cut and not facts.state.attributes.get(PARTITIONS):
        return
    saved = facts.state.topology.get("dp") or len({o.rank for o in cut})
    planned = _planned_dp(facts, plan)
    if planned is None or not saved or planned == saved:
        return
    deepspeed = "zero_stage" in facts.state.topology
    yield _refuse(
        cut[0].subject if cut else facts.path,
        f"the optimizer is cut into parts for {saved} data-parallel ranks, {planned} are planned: such parts do not reshard",
        f"launch with {saved} data-parallel ranks; or {UNIVERSAL}"
        if deepspeed
        else f"launch with {saved} data-parallel ranks",
    )


def _tied(facts: CheckpointFacts, plan: LaunchPlan) -> Iterator[Finding]:
    """Formats in which a file holds what one model-parallel rank holds."""
    why = _tie(facts)
    if why is None or _is(facts, "universal"):
        return
    for size in MODEL_PARALLEL:
        saved, planned = facts.state.topology.get(size), getattr(plan, size)
        if isinstance(saved, int) and planned is not None and planned != saved:
            yield _refuse(
                facts.path,
                f"{why} is tied to {size} {saved}, {size} {planned} is planned",
                f"launch with {size} {saved}, or convert the checkpoint to a format that reshards",
            )


def _tie(facts: CheckpointFacts) -> str | None:
    layout = facts.state.layout or facts.manifest.layout
    if "zero_stage" in facts.state.topology:
        return "DeepSpeed's file of each model-parallel rank"
    if layout.startswith(("megatron", "nemo")):
        if facts.manifest.attributes.get("format") not in (None, "torch_dist"):
            return "Megatron's legacy format"
        if any("gbuf_idx" in t.name for file in facts.files.values() for t in file.tensors):
            return "an optimizer saved as dp_reshardable"
    return None


def _optimizer(facts: CheckpointFacts, plan: LaunchPlan) -> Iterator[Finding]:
    if plan.optimizer is None:
        return
    for optimizer in facts.state.optimizers:
        saved = state_families(optimizer)
        if saved and plan.optimizer not in saved and plan.optimizer in KNOWN:
            yield _refuse(
                optimizer.subject,
                f"the state is that of {' or '.join(sorted(saved))}, {plan.optimizer} is planned: it finds none of the values that it needs",
                "launch with the optimizer that wrote it, or start the optimizer afresh on purpose: resume from the weights alone",
            )
            return


KNOWN = frozenset(
    {"adam", "adam8bit", "adamax", "adagrad", "adafactor", "lion", "muon", "rmsprop", "schedulefree", "sgd"}
)


# --- what would be lost -------------------------------------------------------------------------------


def _generators(facts: CheckpointFacts, plan: LaunchPlan) -> Iterator[Finding]:
    """Random states of processes: those that are not there start afresh, and with them the dropout and the order of data."""
    hint = "expect another trajectory, or launch as before"
    shape = facts.state.attributes.get("rng_parts")
    changed = [s for s in ("tp", "pp") if _differs(facts, plan, s)]
    if shape and changed:
        yield _lose(
            facts.path,
            f"generator states are kept by model-parallel rank, and {' and '.join(changed)} change: they are not loaded",
            hint,
        )
        return
    if plan.world_size is None:
        return
    ranks = {r.rank for r in facts.state.rngs if r.rank is not None}
    subject = facts.state.rngs[0].subject if facts.state.rngs else facts.path
    if ranks and not shape and len(ranks) != plan.world_size:
        fate = (
            "those of the others start afresh" if plan.world_size > len(ranks) else "the others are dropped"
        )
        yield _lose(
            subject,
            f"generator states of {len(ranks)} processes were saved, {plan.world_size} are planned: {fate}",
            hint,
        )
    for state in facts.state.rngs:
        devices = state.streams.get("cuda")
        count = len(devices) if isinstance(devices, list | tuple) else 0
        if count > 1 and count > plan.world_size:
            yield _lose(
                state.subject,
                f"it holds generator states of {count} GPUs, {plan.world_size} processes are planned: a loader that puts all of them back fails",
                "launch with as many GPUs a node as before; Trainer users: the load is skipped with a message",
            )
            return


def _loaders(facts: CheckpointFacts, plan: LaunchPlan) -> Iterator[Finding]:
    ranks = {s.rank for s in facts.state.loaders if s.rank is not None}
    planned = _planned_dp(facts, plan)
    if ranks and planned is not None and planned != len(ranks):
        yield _lose(
            facts.state.loaders[0].subject,
            f"loader states of {len(ranks)} data-parallel ranks were saved, {planned} are planned: samples are repeated or left out",
            "launch as before, or place the data by hand",
        )


def _precision(facts: CheckpointFacts, plan: LaunchPlan) -> Iterator[Finding]:
    if plan.precision == "fp16" and not facts.state.scalers and facts.state.optimizers:
        yield _lose(
            facts.path,
            "fp16 is planned, and no loss scale was saved: it starts afresh and the first steps overflow",
            "launch in the precision that it was trained in",
        )


# --- sizes --------------------------------------------------------------------------------------------


def _planned_dp(facts: CheckpointFacts, plan: LaunchPlan) -> int | None:
    """Data-parallel ranks of the plan; what it does not say of the model's cut stays as it was saved."""
    if plan.world_size is None:
        return None
    cut = 1
    for size in ("tp", "pp", "cp"):
        saved: Any = facts.state.topology.get(size)
        cut *= getattr(plan, size) or (saved if isinstance(saved, int) and saved > 0 else 1)
    return plan.world_size // cut if plan.world_size % cut == 0 else plan.world_size


def _differs(facts: CheckpointFacts, plan: LaunchPlan, size: str) -> bool:
    saved, planned = facts.state.topology.get(size), getattr(plan, size)
    return isinstance(saved, int) and planned is not None and planned != saved


def _is(facts: CheckpointFacts, name: str) -> bool:
    """Whether the checkpoint, or one nested in it, has an attribute."""
    nested = facts.manifest.attributes.get("nested", ())
    return any(m.attributes.get(name) for m in (facts.manifest, *nested))


CHECK = Launch()

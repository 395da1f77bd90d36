"""Whose fault it is: the recipe's, this checkpoint's, or another one's that it is compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptguard.errors import CkptguardError, RecipeError
from ckptguard.inspect import Options, audit
from ckptguard.model import Evidence, NotRun, Severity
from ckptguard.restore.calibration import RunOnce, good_candidates
from ckptguard.restore.held import Refused, open_checkpoint
from ckptguard.restore.model import Fault, Order, Trial
from ckptguard.restore.recorded import SILENT
from ckptguard.restore.target import Target


def blame_recipe_for_misfit(target: Target, trial: Trial) -> None:
    """Raise RecipeError where the model does not fit a checkpoint that is like its siblings: the model is another one."""
    fault = trial.fault
    if fault is None or fault.kind != "misfit":
        return
    own = _shapes(target.path)
    if own is not None and any(_shapes(sibling.path) == own for sibling in target.siblings):
        why = "all checkpoints of this run have these weights"
    elif _fits_its_config(target):
        why = "the checkpoint fits its own config.json"
    else:
        return
    raise RecipeError(
        f"the recipe's model does not fit: {fault.message}", f"{why}: build the model that was trained"
    )


def blame_recipe_for_load(target: Target, order: Order, trial: Trial, run_once: RunOnce) -> Trial:
    """The trial, where its load() refuses this checkpoint alone. Raises RecipeError where it would refuse a good one too.

    Another checkpoint of the run tells; where there is none, an audit of this one.
    """
    fault = trial.fault
    if fault is None or fault.kind != "load":
        return trial
    others = good_candidates(target)[:1]
    for other in others:
        asked = replace(
            order, checkpoint=str(other.path), first=other.step, until=None, against=None, steps=1
        )
        try:
            again = run_once(asked)
        except CkptguardError:
            again = trial
        if again.fault is None:
            told = f"{fault.message}. It does load {other.path.name}"
            return replace(trial, fault=replace(fault, message=told))
        raise RecipeError(
            fault.message, f"it does not load {other.path.name} either; its traceback ends:{_end(fault)}"
        )
    if _is_safe(target):
        raise RecipeError(
            fault.message,
            f"the checkpoint itself is sound, as an audit sees it; its traceback ends:{_end(fault)}",
        )
    return trial


def _end(fault: Fault) -> str:
    return "".join(f"\n  | {line}" for line in fault.detail.splitlines() if line.strip())


def _is_safe(target: Target) -> bool:
    try:
        reports = audit(str(target.path), Options(depth=Evidence.CONTENT))
    except CkptguardError:
        return False
    verdicts = [v for report in reports for v in report.checkpoints]
    return len(verdicts) == 1 and verdicts[0].resume.safe


def _fits_its_config(target: Target) -> bool:
    """Whether weights and the config beside them agree, as an audit sees it."""
    try:
        reports = audit(str(target.path), Options(depth=Evidence.STRUCTURE))
    except CkptguardError:
        return False
    verdicts = [v for report in reports for v in report.checkpoints]
    return len(verdicts) == 1 and verdicts[0].components.get("config") is True and verdicts[0].resume.safe


def _shapes(path: Path) -> dict[str, tuple[int, ...]] | None:
    try:
        leaves = open_checkpoint(str(path)).leaves("model")
    except (Refused, KeyError):
        return None
    return {".".join(name): leaf.shape for name, leaf in leaves.items()}


def distrust(later: Path, trial: Trial) -> str:
    """Why a later checkpoint that differs is no evidence against this one; "" where it is, or does not differ."""
    if not any(d.kind not in SILENT for d in trial.against):
        return ""
    try:
        reports = audit(str(later), Options(depth=Evidence.CONTENT))
    except CkptguardError as error:
        return f"{later.name} cannot be audited: {error.message}"
    unsafe = [v for report in reports for v in report.checkpoints if not v.resume.safe]
    if not unsafe:
        return ""
    named = sorted({f.code for v in unsafe for f in v.findings if f.severity is Severity.ERROR})
    return f"{later.name} is itself {unsafe[0].resume.value} ({', '.join(named)})"


def changed_files(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    """What differs between two listings of a run."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def side_effect(target: Target, changed: list[str]) -> NotRun:
    """The note on files that changed meanwhile. Raises RecipeError where the checkpoint itself is among them."""
    inside = [name for name in changed if (target.run / name).is_relative_to(target.path)]
    if inside:
        raise RecipeError(
            f"the checkpoint changed while it was restored: {', '.join(inside[:3])}",
            "a recipe must not write where it reads; is the training still saving?",
        )
    shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    return NotRun(
        "side-effects",
        f"files of the run changed meanwhile ({shown}): a training is running, or the recipe writes",
    )

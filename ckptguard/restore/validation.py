"""The restore from end to end: find, restore in child processes, measure, conclude. Torch stays in the children."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptguard.errors import CkptguardError, RecipeError, TargetNotFound, UsageError
from ckptguard.inspect import Options, audit
from ckptguard.model import Evidence, NotRun, Severity
from ckptguard.restore.command import command_runner
from ckptguard.restore.compare import Curve, measure_gap
from ckptguard.restore.conclude import conclude, needs_calibration, needs_repeats
from ckptguard.restore.held import Refused, open_checkpoint
from ckptguard.restore.logbook import Precision, continuation, steps_to_replay
from ckptguard.restore.model import METRICS, Limits, Order, RestoreReport, Trial
from ckptguard.restore.recorded import SILENT, Recorded
from ckptguard.restore.target import Sibling, Target, find_target, listing, step_of
from ckptguard.restore.trials import Progress, run_trial
from ckptguard.staging import staged

MORE_REPEATS = 2
"""Before a small difference counts as one, so many more repeats look for noise."""
CALIBRATIONS = 2
"""Of so many earlier checkpoints one must replay like its log before a gap counts as unknown."""
FAR = 4
"""Without a log, a later checkpoint may be so many times further away than the steps that were asked for."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks. `recipe` is FILE.py:NAME or MODULE:NAME, or `command` the training command."""

    checkpoint: str
    recipe: str | None = None
    command: str | None = None
    metrics: str | None = None
    log: str | None = None
    against: str | None = None
    steps: int = 8
    repeats: int = 2
    device: str = "auto"
    nproc: int = 1
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Later:
    """The checkpoint whose whole state the replay is compared with."""

    path: Path
    step: int


RunOnce = Callable[[Order], Trial]


def validate(request: Request, progress: Progress = lambda text: None) -> RestoreReport:
    """Restore, replay, compare. Raises CkptguardError for everything that is not the checkpoint's fault."""
    _check(request)
    with ExitStack() as copies:
        path = copies.enter_context(staged(request.checkpoint))
        against = copies.enter_context(staged(request.against)) if request.against is not None else None
        return _validate(request, path, against, progress)


def _validate(request: Request, path: Path, against: Path | None, progress: Progress) -> RestoreReport:
    began = time.monotonic()
    target = find_target(request.checkpoint, request.log, path)
    if _other_processes(request, target):
        # Each consumed other batches and drew other numbers: what one process replays is another training.
        target = replace(target, rows=())
    later = _later(request, target, against)
    if request.command is not None:
        others = tuple((s.path, s.step) for s in _good_candidates(target))
        run_once = command_runner(request.command, request.metrics, request.limits, others, progress)
    else:

        def run_once(order: Order) -> Trial:
            return run_trial(order, request.limits, progress)

    before = listing(target.run)
    order = _order(request, target, later)
    trials = _trials(request, order, target.gaps, run_once, progress)
    _blame_recipe_for_misfit(target, trials[0])
    recorded = _recorded(request, target, later, order)
    if later is not None and (why := _distrust(later, trials[0])):
        recorded = replace(recorded, against=None, not_run=(*recorded.not_run, NotRun("against", why)))
    while needs_repeats(recorded, trials) and len(trials) < request.repeats + MORE_REPEATS:
        progress(f"the difference is small: restore {len(trials) + 1}, to see more of the noise")
        trials.append(run_once(replace(order, seed=len(trials) + 1) if "rng" in target.gaps else order))
    if needs_calibration(recorded, trials):
        recorded = _calibrate(request, target, recorded, order.steps, run_once, progress)
    changed = _changed(before, listing(target.run))
    if changed:
        recorded = replace(recorded, not_run=(*recorded.not_run, _side_effect(target, changed)))
    return conclude(recorded, trials, time.monotonic() - began)


def _check(request: Request) -> None:
    if (request.recipe is None) == (request.command is None):
        raise UsageError(
            "give either --recipe or --command", "ckptguard restore CHECKPOINT --recipe FILE.py:NAME"
        )
    if request.steps < 1 or request.repeats < 1:
        raise UsageError(f"--steps must be at least 1, got {request.steps}")
    if request.command is not None and "{out}" not in request.command:
        raise UsageError(
            "--command has no {out}: the training would write into the real run",
            "give it as the training's output directory: --command 'python train.py --resume {checkpoint} --output {out}'",
        )
    if request.command is not None and request.against is not None:
        raise UsageError("--against needs --recipe: a command does not show its objects")
    if request.nproc != 1 and request.command is not None:
        raise UsageError(
            f"--nproc {request.nproc}: a command starts its processes itself",
            "put the launcher into it: --command 'torchrun --nproc-per-node 2 train.py ... {checkpoint} {out}'",
        )


def _other_processes(request: Request, target: Target) -> bool:
    """Whether the recipe runs in another number of processes than trained: then it replays another training."""
    return request.command is None and target.processes != request.nproc


def _later(request: Request, target: Target, against: Path | None) -> Later | None:
    if request.command is not None:
        return None  # its objects are not to be seen
    if _other_processes(request, target):
        return None
    if against is None:
        rows = continuation(target.rows, target.step, target.attempt) if target.step is not None else ()
        near = target.next_within(request.steps * (1 if rows else FAR))
        return Later(near.path, near.step) if near else None
    if not against.exists():
        raise TargetNotFound(f"{request.against}: no such checkpoint", "check --against")
    step = step_of(against)
    if target.step is None or step is None:
        unknown = request.checkpoint if target.step is None else str(request.against)
        raise UsageError(f"{unknown}: its step is not known, so nobody knows how far to replay")
    if step <= target.step:
        raise UsageError(f"--against {request.against} is of step {step}, not later than step {target.step}")
    return Later(against.absolute(), step)


def _order(request: Request, target: Target, later: Later | None) -> Order:
    steps = request.steps
    if target.step is not None:
        rows = continuation(target.rows, target.step, target.attempt)
        steps = steps_to_replay(rows, target.step, steps)
    threads = target.environment.get("threads")
    return Order(
        recipe=request.recipe or "",
        checkpoint=str(target.path),
        layout=target.layout,
        device=request.device,
        processes=request.nproc,
        steps=steps,
        first=target.step,
        until=later.step if later else None,
        against=str(later.path) if later else None,
        batches=str(target.batches) if target.batches else None,
        threads=threads if isinstance(threads, int) else None,
    )


def _trials(
    request: Request, order: Order, gaps: tuple[str, ...], run_once: RunOnce, progress: Progress
) -> list[Trial]:
    """The repeats of one order. A checkpoint that was refused is refused again: once is enough."""
    trials: list[Trial] = []
    for number in range(1, request.repeats + 1):
        progress(f"restore {number} of {request.repeats}")
        trials.append(run_once(replace(order, seed=number) if "rng" in gaps else order))
        if trials[-1].fault is not None:
            break
    return trials


def _recorded(request: Request, target: Target, later: Later | None, order: Order) -> Recorded:
    rows = continuation(target.rows, target.step, target.attempt) if target.step is not None else ()
    not_run = []
    if target.seal_trouble:
        not_run.append(NotRun("seal", target.seal_trouble))
    elif target.seal is None:
        not_run.append(NotRun("seal", "there is none: nothing was recorded at the save"))
    if target.step is None:
        not_run.append(
            NotRun("replay", "the checkpoint's step is not known, so no row of a log can follow it")
        )
    if order.until is None:
        not_run.append(NotRun("against", "no later checkpoint within a few steps"))
    seal = target.seal
    draws: dict[str, tuple[str, ...]] = {}
    if _other_processes(request, target):
        not_run.append(
            NotRun(
                "replay",
                f"{target.processes} processes trained it, {request.nproc} restored it: give --nproc",
            )
        )
    elif seal is not None:
        draws = {stream: tuple(words) for stream, words in seal.rng.get("0", {}).items()}
    return Recorded(
        checkpoint=target.given,
        step=target.step,
        layout=target.layout,
        rows=rows,
        column=target.rows,
        draws=draws,
        probe=seal.probe.loss if seal is not None and seal.probe is not None else None,
        environment=target.environment,
        gaps=target.gaps,
        against=later.path.name if later else None,
        until=later.step if later else None,
        not_run=tuple(not_run),
    )


def _distrust(later: Later, trial: Trial) -> str:
    """Why a later checkpoint that differs is no evidence against this one; "" where it is, or does not differ."""
    if not any(d.kind not in SILENT for d in trial.against):
        return ""
    try:
        reports = audit(str(later.path), Options(depth=Evidence.CONTENT))
    except CkptguardError as error:
        return f"{later.path.name} cannot be audited: {error.message}"
    unsafe = [v for report in reports for v in report.checkpoints if not v.resume.safe]
    if not unsafe:
        return ""
    named = sorted({f.code for v in unsafe for f in v.findings if f.severity is Severity.ERROR})
    return f"{later.path.name} is itself {unsafe[0].resume.value} ({', '.join(named)})"


# --- calibration ----------------------------------------------------------------------------------------------


def _calibrate(
    request: Request, target: Target, recorded: Recorded, steps: int, run_once: RunOnce, progress: Progress
) -> Recorded:
    """Measure the gap between this environment and the recorded one on another checkpoint that replays as recorded."""
    why = ""
    for sibling in _good_candidates(target)[:CALIBRATIONS]:
        progress(f"calibrating on {sibling.path.name}")
        try:
            gap = _gap(request, target, sibling, steps, run_once)
        except CkptguardError as error:
            why = f"{sibling.path.name} could not be replayed: {error.message}"
            continue
        if gap is not None:
            return replace(recorded, gap=gap, calibrated_on=sibling.path.name)
        why = (
            f"{sibling.path.name} does not replay as recorded either: recipe, data or environment are others"
        )
    return replace(recorded, no_gap=why)


def _good_candidates(target: Target) -> tuple[Sibling, ...]:
    """Earlier checkpoints, the nearest first: what went wrong later is not in them. Then the later ones."""
    later = [s for s in target.siblings if target.step is not None and s.step > target.step]
    return (*target.earlier(), *sorted(later, key=lambda s: s.step))


def _gap(
    request: Request, target: Target, sibling: Sibling, steps: int, run_once: RunOnce
) -> dict[str, Curve] | None:
    rows = continuation(target.rows, sibling.step)
    others = [s for s in target.siblings if sibling.step < s.step <= sibling.step + steps * FAR]
    after = min(others, key=lambda s: s.step, default=None) if not rows else None
    if not rows and after is None:
        return None
    order = Order(
        recipe=request.recipe or "",
        checkpoint=str(sibling.path),
        layout=target.layout,
        device=request.device,
        processes=request.nproc,
        steps=steps_to_replay(rows, sibling.step, steps),
        first=sibling.step,
        until=after.step if after else None,
        against=str(after.path) if after else None,
    )
    trial = run_once(order)
    if trial.fault is not None or any(d.kind not in SILENT for d in trial.state):
        return None
    if after is not None:
        same = trial.against_compared and not any(d.kind not in SILENT for d in trial.against)
        return dict.fromkeys(METRICS, ()) if same else None
    return measure_gap(rows, trial.steps, Precision(target.rows))


# --- whose fault ------------------------------------------------------------------------------------------------


def _blame_recipe_for_misfit(target: Target, trial: Trial) -> None:
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


def _changed(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _side_effect(target: Target, changed: list[str]) -> NotRun:
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

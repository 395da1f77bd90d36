"""The restore from end to end: find, restore in child processes, measure, conclude. Torch stays in the children."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ckptguard.errors import TargetNotFound, UsageError
from ckptguard.model import NotRun
from ckptguard.restore.calibration import FAR, RunOnce, calibrate, good_candidates
from ckptguard.restore.command import command_runner
from ckptguard.restore.conclude import conclude, needs_calibration, needs_repeats
from ckptguard.restore.fault import (
    blame_recipe_for_load,
    blame_recipe_for_misfit,
    changed_files,
    distrust,
    side_effect,
)
from ckptguard.restore.logbook import continuation, steps_to_replay
from ckptguard.restore.model import Order, RestoreReport, Trial
from ckptguard.restore.recorded import Recorded
from ckptguard.restore.request import Request, check
from ckptguard.restore.steps import step_of
from ckptguard.restore.target import Target, find_target, listing
from ckptguard.restore.trials import Progress, run_trial
from ckptguard.staging import staged

MORE_REPEATS = 2
"""Before a small difference counts as one, so many more repeats look for noise."""


@dataclass(frozen=True, slots=True)
class Later:
    """The checkpoint whose whole state the replay is compared with."""

    path: Path
    step: int


def validate(request: Request, progress: Progress = lambda text: None) -> RestoreReport:
    """Restore, replay, compare. Raises CkptguardError for everything that is not the checkpoint's fault."""
    check(request)
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
        others = tuple((s.path, s.step) for s in good_candidates(target))
        run_once = command_runner(request.command, request.metrics, request.limits, others, progress)
    else:

        def run_once(order: Order) -> Trial:
            return run_trial(order, request.limits, progress)

    before = listing(target.run)
    order = _order(request, target, later)
    trials = _trials(request, order, target.gaps, run_once, progress)
    blame_recipe_for_misfit(target, trials[0])
    trials[0] = blame_recipe_for_load(target, order, trials[0], run_once)
    recorded = _recorded(request, target, later, order)
    if later is not None and (why := distrust(later.path, trials[0])):
        recorded = replace(recorded, against=None, not_run=(*recorded.not_run, NotRun("against", why)))
    while needs_repeats(recorded, trials) and len(trials) < request.repeats + MORE_REPEATS:
        progress(f"the difference is small: restore {len(trials) + 1}, to see more of the noise")
        trials.append(run_once(replace(order, seed=len(trials) + 1) if "rng" in target.gaps else order))
    if needs_calibration(recorded, trials):
        recorded = calibrate(request, target, recorded, trials[0], order.steps, run_once, progress)
    changed = changed_files(before, listing(target.run))
    if changed:
        recorded = replace(recorded, not_run=(*recorded.not_run, side_effect(target, changed)))
    return conclude(recorded, trials, time.monotonic() - began)


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
                f"{target.processes} process{'es' * (target.processes > 1)} trained it, {request.nproc} restored it: "
                f"give --nproc {target.processes}",
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

"""The gap between this environment and the one that trained, measured on another checkpoint of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckptguard.errors import CkptguardError
from ckptguard.restore.compare import Curve, measure_gap
from ckptguard.restore.logbook import Precision, continuation, steps_to_replay
from ckptguard.restore.model import METRICS, Order, Trial
from ckptguard.restore.recorded import SILENT, Recorded, left_out
from ckptguard.restore.request import Request
from ckptguard.restore.target import Sibling, Target
from ckptguard.restore.trials import Progress

CALIBRATIONS = 2
"""Of so many other checkpoints one must replay as recorded before a gap counts as unknown."""
FAR = 4
"""Without a log, a later checkpoint may be so many times further away than the steps that were asked for."""

RunOnce = Callable[[Order], Trial]


def calibrate(
    request: Request,
    target: Target,
    recorded: Recorded,
    first: Trial,
    steps: int,
    run_once: RunOnce,
    progress: Progress,
) -> Recorded:
    """Measure the gap between this environment and the recorded one on another checkpoint that replays as recorded.

    `first` is the trial that it is measured for.
    """
    lacking = left_out(first.state)
    if lacking:
        # It would lack it on every checkpoint alike, and the fault would pass for a gap.
        return replace(recorded, no_gap=f"the recipe does not restore {', '.join(lacking)}")
    why = ""
    for sibling in good_candidates(target)[:CALIBRATIONS]:
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


def good_candidates(target: Target) -> tuple[Sibling, ...]:
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

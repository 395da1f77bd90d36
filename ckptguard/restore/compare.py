"""Compares replayed steps with logged ones, within a tolerance that was measured, never assumed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ckptguard.model import LogRow
from ckptguard.restore.logbook import Precision
from ckptguard.restore.model import METRICS, ComparedStep, Noise, StepNumbers, Trial

FACTOR = 4.0
"""Two repeats show one difference of a distribution: a third may well lie some times as far away."""
SINGLE = 2.0**-23
"""Relative spacing of single precision: what the order of a sum over steps may change."""
COMPUTED = frozenset({"loss", "grad_norm"})
"""Metrics that depend on the machine's arithmetic. Learning rate and loss scale do not: any difference is real."""
CLOSE = 1e-3
"""A share of the value below which a difference may be noise that was not seen yet."""
LEAP = 1e-4
"""After a first step that agrees in full, no other machine's arithmetic differs by more than this share within a replay."""
MOST_GAP = 0.02
"""A gap beyond this share of the value is no property of two machines: the recipe does not repeat that training."""

Curve = tuple[float, ...]


def spread(trials: Sequence[Trial]) -> dict[str, Curve]:
    """The largest difference between any two trials up to each replayed step, by metric."""
    return {
        m: c for m in METRICS if (c := _running([_span(_values(trials, m, at)) for at in _offsets(trials)]))
    }


def _offsets(trials: Sequence[Trial]) -> range:
    return range(min((len(trial.steps) for trial in trials), default=0))


def _values(trials: Sequence[Trial], metric: str, at: int) -> list[float]:
    found = (trial.steps[at].metric(metric) for trial in trials)
    return [value for value in found if value is not None]


def _span(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    return max(distance(a, b) for a in values for b in values)


def _running(values: Sequence[float]) -> Curve:
    curve: list[float] = []
    for value in values:
        curve.append(max(value, curve[-1]) if curve else value)
    return tuple(curve)


def distance(left: float, right: float) -> float:
    """Absolute difference; 0 between equal infinities and between NaNs, infinity where only one is finite."""
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    gap = abs(left - right)
    return gap if math.isfinite(gap) else math.inf


def same_environment(recorded: Mapping[str, object], here: Mapping[str, object]) -> bool | None:
    """Whether this is the environment that wrote the log; None when the record does not say.

    Every key that both state must agree; the version of torch and the device must be among them.
    """
    if not {"torch", "device"} <= recorded.keys() & here.keys():
        return None
    return all(recorded[key] == here[key] for key in recorded.keys() & here.keys())


# --- one checkpoint -------------------------------------------------------------------------------------


def compare_steps(
    rows: Sequence[LogRow], replayed: Sequence[StepNumbers], noise: Noise, precision: Precision
) -> tuple[ComparedStep, ...]:
    """Each row of the log for which the replay has numbers, with the tolerance that was measured."""
    by_step = {numbers.step: numbers for numbers in replayed}
    first = min(by_step, default=0)
    found = []
    for row in rows:
        here = by_step.get(row.step)
        if here is None:
            continue
        logged: dict[str, float] = {}
        given: dict[str, float] = {}
        tolerance: dict[str, float] = {}
        exact = ok = True
        for metric in METRICS:
            want = getattr(row, metric)
            got = _mean_loss(row, here, by_step) if metric == "loss" else here.metric(metric)
            if want is None or got is None:
                continue
            rounding = precision.of(metric, want) + _arithmetic(metric, row, want)
            allowed = rounding + FACTOR * _measured(noise, metric, row.step - first)
            if any(noise.values.get(metric, ())):
                # A device that does not repeat may do so by chance for a step or two: a few roundings are always due.
                allowed += FACTOR * SINGLE * abs(want)
            off = distance(want, got)
            logged[metric], given[metric], tolerance[metric] = want, got, allowed
            exact &= off <= rounding
            ok &= off <= allowed
        if logged:
            found.append(ComparedStep(row.step, ok, exact, logged, given, tolerance, row.span))
    return tuple(found)


def is_close(step: ComparedStep) -> bool:
    """Whether a step that differs does so by little, in what a machine computes: noise may not have been seen yet."""
    return all(
        metric in COMPUTED and distance(value, step.replayed[metric]) < CLOSE * abs(value)
        for metric, value in step.logged.items()
        if distance(value, step.replayed[metric]) > step.tolerance[metric]
    )


def _mean_loss(row: LogRow, here: StepNumbers, by_step: Mapping[int, StepNumbers]) -> float | None:
    """The replay's loss over the steps that the row is a mean of; None where some of them were not replayed."""
    if row.span == here.span:
        return here.loss
    if here.span != 1:
        return None
    losses = []
    for step in range(row.step - row.span + 1, row.step + 1):
        numbers = by_step.get(step)
        if numbers is None or numbers.loss is None or numbers.span != 1:
            return None
        losses.append(numbers.loss)
    return math.fsum(losses) / len(losses)


def _arithmetic(metric: str, row: LogRow, value: float) -> float:
    """What writing, reading and averaging alone may change."""
    if not math.isfinite(value):
        return 0.0
    if metric == "loss" and row.span > 1:
        return abs(value) * SINGLE * row.span
    return 0.0 if metric in COMPUTED else abs(value) * 1e-9


def _measured(noise: Noise, metric: str, offset: int) -> float:
    return _at(noise.values.get(metric, ()), offset) + _at((noise.gap or {}).get(metric, ()), offset)


def _at(curve: Curve, offset: int) -> float:
    return curve[min(offset, len(curve) - 1)] if curve else 0.0


# --- the gap between two environments ---------------------------------------------------------------------


def measure_gap(
    rows: Sequence[LogRow], replayed: Sequence[StepNumbers], precision: Precision
) -> dict[str, Curve] | None:
    """How far the replay of a good checkpoint lies from its log, up to each step; None where that cannot be a gap.

    It cannot where nothing could be compared, a learning rate or loss scale differs, or the difference is large.
    """
    steps = compare_steps(rows, replayed, Noise(), precision)
    if not any("loss" in step.logged for step in steps):
        return None
    if _leaps(steps):
        return None
    first = min(numbers.step for numbers in replayed)
    curves: dict[str, Curve] = {}
    for metric in METRICS:
        offs: list[float] = []
        for step in steps:
            if metric not in step.logged:
                continue
            rounding = step.tolerance[metric]  # without noise it is that of the log alone
            off = max(0.0, distance(step.logged[metric], step.replayed[metric]) - rounding)
            if off > (MOST_GAP * abs(step.logged[metric]) if metric in COMPUTED else 0.0):
                return None
            offs += [off] * (step.step - first + 1 - len(offs))
        if offs:
            curves[metric] = _running(offs)
    return curves


def _leaps(steps: Sequence[ComparedStep]) -> bool:
    """Whether loss and gradient norm agree to the bit at first and lie apart after an update: then it is the update that
    differs (an optimizer that was not restored), and not the machine, whose forward and backward pass are the recorded ones.
    """
    first = steps[0]
    if not first.exact or not first.logged.keys() >= COMPUTED or first.span != 1:
        return False
    if any(
        first.tolerance[m] > 4 * SINGLE * abs(first.logged[m]) or _coarse(first.logged[m]) for m in COMPUTED
    ):
        return False  # written or computed in so few digits that agreeing says little
    return any(
        distance(step.logged[m], step.replayed[m]) > LEAP * abs(step.logged[m]) + step.tolerance[m]
        for step in steps
        for m in COMPUTED & step.logged.keys()
    )


def _coarse(value: float) -> bool:
    """Whether a half-precision number can hold it."""
    mantissa, _ = math.frexp(value)
    return (mantissa * 2**11).is_integer()


# --- batches ----------------------------------------------------------------------------------------------


def compare_batches(
    rows: Sequence[LogRow], replayed: Sequence[StepNumbers]
) -> tuple[int, tuple[tuple[int, str, str], ...]]:
    """(how many fingerprints were compared, those that differ as (step, recorded, replayed))."""
    recorded = {row.step: row.extra.get("batch") for row in rows}
    compared = 0
    wrong = []
    for numbers in replayed:
        want = recorded.get(numbers.step)
        if isinstance(want, str) and numbers.batch is not None:
            compared += 1
            if want != numbers.batch:
                wrong.append((numbers.step, want, numbers.batch))
    return compared, tuple(wrong)

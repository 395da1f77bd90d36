"""The pure decisions: which rows continue a checkpoint, how fine they are, how far a replay may lie from them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.model import LogRow
from ckptguard.restore.compare import (
    FACTOR,
    compare_batches,
    compare_steps,
    measure_gap,
    same_environment,
    spread,
)
from ckptguard.restore.logbook import Precision, continuation, steps_to_replay
from ckptguard.restore.model import Noise, StepNumbers, Trial


def rows(*steps, attempt=None, span=1, **values):
    return [LogRow(step=s, loss=values.get("loss", 1.0 / s), attempt=attempt, span=span) for s in steps]


def steps_of(found):
    return [(row.attempt, row.step) for row in found]


def test_the_attempt_that_wrote_it_goes_on():
    log = [*rows(*range(1, 26), attempt=1), *rows(*range(21, 31), attempt=2)]
    assert steps_of(continuation(log, 20, 1)) == [(1, s) for s in range(21, 26)]
    assert steps_of(continuation(log, 20, 2)) == [(2, s) for s in range(21, 31)]
    assert steps_of(continuation(log, 20)) == [(1, s) for s in range(21, 26)]


def test_an_attempt_that_ended_there_is_continued_by_the_next():
    log = [*rows(*range(1, 21), attempt=1), *rows(*range(21, 31), attempt=2)]
    assert steps_of(continuation(log, 20, 1)) == [(2, s) for s in range(21, 31)]


def test_without_attempts_steps_that_go_back_begin_another():
    log = [*rows(*range(1, 26)), *rows(*range(11, 31))]
    assert [row.step for row in continuation(log, 20)] == list(range(21, 26))
    assert [row.step for row in continuation(log, 25)] == list(range(26, 31))
    assert continuation(log, 30) == ()


def test_events_evaluations_and_other_ranks_are_no_steps():
    log = [
        LogRow(step=21, loss=2.0, extra={"rank": 0}),
        LogRow(step=21, loss=3.0, extra={"rank": 1}),
        LogRow(step=21, grad_norm=0.5),
        LogRow(step=22, extra={"event": "save"}),
        LogRow(step=22, loss=1.5),
    ]
    found = continuation(log, 20)
    assert [(r.step, r.loss, r.grad_norm) for r in found] == [(21, 2.0, 0.5), (22, 1.5, None)]


def test_a_log_of_means_asks_for_as_many_steps_as_its_first_whole_row():
    log = rows(10, 20, 30, 40, span=10)
    assert steps_to_replay(continuation(log, 20), 20, 8) == 10
    assert steps_to_replay(continuation(log, 25), 25, 8) == 15
    assert steps_to_replay(rows(1000, span=1000), 0, 8) == 8


@pytest.mark.parametrize(
    "column, value, tolerance",
    [
        ([2.3145, 1.9, 0.0123], 2.3145, 5e-5),  # "%.4f"
        ([1.25e-3, 1.2e-3, 9.87e-4], 1.25e-3, 5e-6),  # "%.2e"
        ([2.3145678901, 1.9], 1.9, 0.0),  # in full
        ([0.001], 0.001, 0.0),  # one single value says nothing
        ([1024.0, 2048.0], 1024.0, 0.0),  # whole numbers
    ],
)
def test_how_finely_a_column_was_written(column, value, tolerance):
    precision = Precision(LogRow(step=at, loss=number) for at, number in enumerate(column))
    assert precision.of("loss", value) == pytest.approx(tolerance, rel=1e-6)


@given(st.floats(0.01, 100), st.integers(2, 6))
def test_a_rounded_log_never_accuses_its_own_numbers(value, places):
    column = [round(value * factor, places) for factor in (1, 0.77, 0.31)]
    precision = Precision(LogRow(step=at, loss=number) for at, number in enumerate(column))
    for factor, written in zip((1, 0.77, 0.31), column, strict=True):
        full = precision.of("loss", written) == 0.0  # so few digits that nothing was cut off
        assert full or abs(value * factor - written) <= precision.of("loss", written) * (1 + 1e-6)


def trial(*losses, first=21):
    return Trial(steps=tuple(StepNumbers(first + at, loss=loss) for at, loss in enumerate(losses)))


def test_tolerance_is_the_measured_noise_and_gap():
    log = [LogRow(step=21, loss=1.0), LogRow(step=22, loss=1.0)]
    noise = Noise(2, {"loss": (0.0, 1e-3)}, {"loss": (0.0, 2e-3)})
    first, second = compare_steps(log, trial(1.0005, 1.0119).steps, noise, Precision(()))
    # The device does not repeat, so a few roundings are due even where the repeats happened to agree.
    assert not first.ok and first.tolerance["loss"] == pytest.approx(FACTOR * 2**-23)
    assert second.ok and second.tolerance["loss"] == pytest.approx(FACTOR * 3e-3, rel=1e-3)
    assert not second.exact


def test_a_mean_is_compared_with_the_mean_of_its_steps_or_not_at_all():
    log = [LogRow(step=22, loss=2.0, lr=0.1, span=5), LogRow(step=26, loss=3.0, lr=0.1, span=4)]
    replay = [StepNumbers(21 + at, loss=loss, lr=0.1) for at, loss in enumerate([9, 9, 2.0, 3.0, 3.0, 4.0])]
    partly, whole = compare_steps(log, replay, Noise(), Precision(()))
    assert set(partly.logged) == {"lr"}  # it covers steps before the checkpoint
    assert whole.replayed["loss"] == 3.0 and whole.exact


def test_nan_equals_nan_and_nothing_else():
    log = [LogRow(step=21, loss=math.nan), LogRow(step=22, loss=1.0)]
    same, other = compare_steps(log, trial(math.nan, math.nan).steps, Noise(), Precision(()))
    assert same.exact and not other.ok


def test_noise_never_shrinks_along_the_steps():
    curves = spread([trial(1.0, 1.1, 1.2), trial(1.0, 1.3, 1.2)])
    assert curves["loss"] == pytest.approx((0.0, 0.2, 0.2))


def test_a_gap_is_small_and_never_one_of_the_rate():
    log = [LogRow(step=21, loss=1.0, lr=0.1), LogRow(step=22, loss=1.0, lr=0.1)]
    near = [StepNumbers(21, loss=1.001, lr=0.1), StepNumbers(22, loss=1.002, lr=0.1)]
    assert measure_gap(log, near, Precision(()))["loss"] == pytest.approx((0.001, 0.002))
    assert measure_gap(log, [StepNumbers(21, loss=1.5, lr=0.1)], Precision(())) is None
    assert measure_gap(log, [StepNumbers(21, loss=1.0, lr=0.2)], Precision(())) is None
    assert measure_gap(log, [], Precision(())) is None


def test_environments_are_the_same_only_where_both_say_so():
    here = {"torch": "2.13", "device": "cpu", "threads": 2}
    assert same_environment(here, here) is True
    assert same_environment({**here, "threads": 1}, here) is False
    assert same_environment({"threads": 2}, here) is None


def test_batches_are_compared_where_both_sides_have_them():
    log = [LogRow(step=21, extra={"batch": "a"}), LogRow(step=22, extra={"batch": "b"}), LogRow(step=23)]
    replay = [StepNumbers(21, batch="a"), StepNumbers(22, batch="c"), StepNumbers(23, batch="d")]
    assert compare_batches(log, replay) == (2, ((22, "b", "c"),))


def test_an_update_that_differs_is_no_gap_between_machines():
    log = [LogRow(step=21 + n, loss=2.30000043 + n, grad_norm=1.20000051, lr=0.1) for n in range(3)]
    first = StepNumbers(21, loss=log[0].loss, grad_norm=log[0].grad_norm, lr=0.1)

    def gap(leap, first=first):
        later = StepNumbers(22, loss=log[1].loss * (1 + leap), grad_norm=log[1].grad_norm, lr=0.1)
        return measure_gap(log, [first, later], Precision(()))

    # Forward and backward pass agree to the bit: another optimizer made the next step, not another machine.
    assert gap(1e-3) is None
    assert gap(1e-6)["loss"][1] > 0
    # Nothing of the kind is known where the first step differs as well, or its gradient was not compared.
    assert gap(1e-3, StepNumbers(21, loss=2.3001, grad_norm=1.2, lr=0.1)) is not None
    assert gap(1e-3, StepNumbers(21, loss=log[0].loss, lr=0.1)) is not None


def test_numbers_of_half_precision_agree_easily():
    log = [LogRow(step=21, loss=5.4375, grad_norm=1.25), LogRow(step=22, loss=5.4375, grad_norm=1.25)]
    near = [StepNumbers(21, loss=5.4375, grad_norm=1.25), StepNumbers(22, loss=5.40625, grad_norm=1.25)]
    assert measure_gap(log, near, Precision(()))["loss"] == pytest.approx((0.0, 0.03125))

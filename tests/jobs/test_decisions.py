"""The pure decisions of the jobs: a save's life, a run's rhythm and activity, schedules, work at risk."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

import pytest

from ckptguard.jobs import activity as act
from ckptguard.jobs.lifecycle import Look, Phase, Save, advance, inherit, seconds
from ckptguard.jobs.rhythm import Saved, low_space, missed, odd_saves, usual
from ckptguard.jobs.risk import Known, work_at_risk
from ckptguard.jobs.schedule import (
    Candidate,
    Extent,
    by_need,
    coverage,
    due_again,
    first_delay,
    next_portion,
    pick_for_restore,
    portion,
)
from ckptguard.model import Evidence, LogRow, Resume, Severity
from ckptguard.settings import PolicySettings

POLICY = PolicySettings()
LOOK = Look("checkpoint-3", "hf-trainer", 3, 100, 2, 1000.0, 1000.0, "f1", whole=False)


def look(save: Save | None, seen: Look | None, now: float, *, newer: bool = False) -> Save:
    step = advance(save, seen, now, settle=3.0, stall_after=600.0, newer_complete=newer)
    assert step is not None
    return step.save


# --- the life of a save -------------------------------------------------------------------------------


def test_a_save_starts_grows_settles_and_is_complete_with_its_duration() -> None:
    save = look(None, LOOK, 1000.0)
    assert save.phase is Phase.STARTED
    save = look(save, replace(LOOK, fingerprint="f2", bytes=200, modified=1010.0), 1010.0)
    assert save.phase is Phase.GROWING
    done = replace(LOOK, fingerprint="f3", bytes=300, modified=1020.0, whole=True)
    save = look(save, done, 1020.0)
    assert save.phase is Phase.GROWING, "not before it has lain still"
    save = look(save, done, 1024.0)
    assert save.phase is Phase.COMPLETE
    assert seconds(save, done) == 20.0


def test_a_save_that_does_not_grow_is_stalled_and_goes_on_when_it_does() -> None:
    save = look(look(None, LOOK, 1000.0), LOOK, 1601.0)
    assert save.phase is Phase.STALLED
    assert look(save, replace(LOOK, fingerprint="f2"), 1700.0).phase is Phase.GROWING


def test_an_unfinished_save_has_failed_once_a_later_one_is_complete() -> None:
    save = look(look(None, LOOK, 1000.0), LOOK, 1010.0, newer=True)
    assert save.phase is Phase.FAILED


def test_what_lay_still_before_we_came_is_complete_at_first_sight_and_its_time_unknown_for_one_file() -> None:
    old = replace(LOOK, whole=True, files=1)
    save = look(None, old, 5000.0)
    assert (save.phase, save.watched, seconds(save, old)) == (Phase.COMPLETE, False, None)


def test_gone_is_rotated_if_it_was_complete_and_vanished_if_not_and_may_come_back() -> None:
    complete = look(None, replace(LOOK, whole=True), 5000.0)
    assert look(complete, None, 5001.0).phase is Phase.ROTATED
    vanished = look(look(None, LOOK, 1000.0), None, 1001.0)
    assert vanished.phase is Phase.VANISHED
    assert look(vanished, LOOK, 1005.0).phase is Phase.STARTED


def test_a_clock_that_jumps_back_concludes_nothing() -> None:
    whole = replace(LOOK, whole=True)
    save = look(None, whole, 1000.0)
    assert look(save, whole, 10.0).phase is Phase.STARTED
    assert look(save, whole, 1004.0).phase is Phase.COMPLETE


def test_a_renamed_temporary_save_began_when_the_temporary_one_did() -> None:
    temporary = look(None, replace(LOOK, path="tmp-checkpoint-3"), 1000.0)
    final = look(None, replace(LOOK, modified=1050.0), 1050.0)
    assert inherit([final], {3: temporary})[0].first_seen == 1000.0


# --- rhythm -------------------------------------------------------------------------------------------


def saves(*times: float, size: int = 1000, seconds: float = 5.0) -> list[Saved]:
    return [Saved(f"c{n}", n * 10, t, seconds, size) for n, t in enumerate(times)]


def test_a_run_has_no_habits_before_it_has_saved_a_few_times() -> None:
    assert usual(saves(0.0, 100.0)).interval is None
    assert list(missed(saves(0.0, 100.0), 9e9, POLICY, target="r", running=True, step=1, writing=False)) == []


def test_a_missed_save_is_told_by_steps_where_there_is_a_log() -> None:
    known = saves(0.0, 100.0, 200.0, 300.0)

    def codes(now: float, step: int | None, running: bool | None) -> list[tuple[str, Severity]]:
        found = missed(known, now, POLICY, target="r", running=running, step=step, writing=False)
        return [(f.code, f.severity) for f in found]

    assert codes(480.0, 55, True) == [("missed-save", Severity.WARNING)]
    assert codes(350.0, 35, True) == []
    assert codes(9000.0, 35, False) == [], "a paused run misses nothing"
    assert codes(9000.0, None, None) == [("missed-save", Severity.INFO)], "without a log it is no alarm"


def test_a_save_is_compared_with_the_ones_before_it() -> None:
    known = saves(0, 100, 200, 300)
    newest = Saved("c4", 40, 400, 60.0, 5000)
    assert [f.code for f in odd_saves([*known, newest], POLICY)] == ["slow-save", "odd-size"]
    assert list(odd_saves([*known, replace(newest, seconds=9.0, bytes=1100)], POLICY)) == []
    varied = [replace(s, bytes=s.bytes * (1 + n % 2)) for n, s in enumerate(known)]
    assert list(odd_saves([*varied, replace(newest, seconds=5.0)], POLICY)) == [], "sizes that vary are usual"


def test_space_must_last_for_the_next_saves_in_bytes_and_in_inodes() -> None:
    def codes(free: int, inodes: int | None) -> list[str]:
        return [f.code for f in low_space(free, inodes, 1000.0, 10, POLICY, "r")]

    assert codes(2999, None) == ["low-space"]
    assert codes(3000, 29) == ["low-space"]
    assert codes(3000, 30) == []


# --- activity -----------------------------------------------------------------------------------------


def rows(start: int, count: int, at: float, every: float = 10.0, attempt: int = 1) -> list[LogRow]:
    return [
        LogRow(
            step=start + n, loss=2.0, attempt=attempt, extra=MappingProxyType({"time": 1e9 + at + n * every})
        )
        for n in range(count)
    ]


def state(pulses: list[act.Pulse], now: float, total: int | None = None) -> act.Activity:
    return act.activity(
        pulses, 1e9 + now, total_steps=total, newest_step=None, last_change=None, save_interval=None
    )


def test_a_run_is_running_while_it_logs_within_two_intervals_and_paused_after() -> None:
    beat = act.pulse("log", 0, None, rows(1, 10, 0.0, every=50.0), 0.0)
    assert beat.interval == 50.0
    assert state([beat], 450.0 + 99.0).state is act.State.RUNNING
    assert state([beat], 450.0 + 101.0).state is act.State.PAUSED


def test_a_long_evaluation_that_it_came_back_from_is_one_of_its_habits_and_a_restart_is_not() -> None:
    beat = act.pulse("log", 0, None, rows(1, 10, 0.0), 0.0)
    after_evaluation = act.pulse("log", 0, beat, rows(11, 5, 700.0), 0.0)
    assert after_evaluation.patience > 600
    restarted = act.pulse("log", 0, beat, [*rows(11, 1, 95.0), *rows(12, 5, 90000.0, attempt=2)], 0.0)
    assert restarted.patience == act.LEAST


def test_a_run_that_reached_its_planned_steps_is_finished_however_long_ago() -> None:
    beat = act.pulse("log", 0, None, rows(1, 10, 0.0), 0.0)
    assert state([beat], 1e6, total=10).state is act.State.FINISHED


def test_a_stopped_training_is_an_alarm_only_with_unsaved_work_and_after_a_while() -> None:
    beat = act.pulse("log", 0, None, rows(1, 10, 0.0), 0.0)
    paused = state([beat], 500.0)

    def severities(saved: int, now: float) -> list[str]:
        return [a.severity for a in act.stopped(paused, saved, 1e9 + now, after=900.0, planned=100)]

    assert severities(10, 5000.0) == [], "it saved before it left: the queue has it"
    assert severities(5, 500.0) == ["info"]
    assert severities(5, 1100.0) == ["warning"]


def test_a_lost_rank_is_named_while_others_go_on_and_not_when_all_stop() -> None:
    alive = act.pulse("steps-0", 0, None, rows(1, 30, 0.0), 0.0)
    dead = act.pulse("steps-1", 1, None, rows(1, 10, 0.0), 0.0)
    (anomaly,) = act.lost_ranks([alive, dead], 1e9 + 300.0)
    assert (anomaly.code, anomaly.step) == ("rank-lost", 10)
    assert "rank 1 logged step 10 last" in anomaly.evidence
    assert list(act.lost_ranks([alive, dead], 1e9 + 3000.0)) == []


def test_nan_is_named_with_its_first_step_and_a_skipped_step_is_none() -> None:
    bad = [LogRow(4, 2.0), LogRow(5, math.nan), LogRow(6, math.inf)]
    assert [a.step for a in act.nonfinite(bad)] == [5]
    assert list(act.nonfinite([LogRow(5, math.inf, extra=MappingProxyType({"skipped": True}))])) == []


# --- work at risk -------------------------------------------------------------------------------------


KNOWN = [
    Known("c10", 10, 100.0, Resume.EXACT, Evidence.CONTENT, True),
    Known("c20", 20, 200.0, Resume.UNSAFE, Evidence.CONTENT, False),
    Known("c30", 30, 300.0, Resume.UNKNOWN, Evidence.LISTING, False),
]


def test_work_at_risk_counts_from_the_newest_proven_one() -> None:
    risk = work_at_risk(
        KNOWN, now=400.0, step=37, step_at=399.0, step_seconds=10.0, started=0.0, running=True, gpus=8
    )
    assert risk.document() == {
        "steps": 27, "seconds": 270.0, "gpu_hours": 0.6, "newest_safe": "c10", "evidence": "content",
    }  # fmt: skip


def test_what_was_saved_after_the_last_line_that_was_read_of_the_log_is_ahead_of_it() -> None:
    late = Known("c50", 50, 399.5, Resume.UNKNOWN, Evidence.LISTING, False)
    older = Known("c90", 90, 5.0, Resume.UNSAFE, Evidence.CONTENT, False)  # of an attempt before a roll-back

    def steps(*known: Known) -> int | None:
        return work_at_risk(
            known, now=400.0, step=37, step_at=399.0, step_seconds=10.0, started=0.0, running=True, gpus=8
        ).steps

    assert steps(*KNOWN, late) == 40
    assert steps(*KNOWN, older) == 27


def test_without_a_safe_checkpoint_everything_since_the_start_is_at_risk() -> None:
    risk = work_at_risk(
        KNOWN[1:], now=400.0, step=37, step_at=None, step_seconds=None, started=100.0, running=True, gpus=None
    )
    assert (risk.steps, risk.seconds, risk.newest_safe) == (37, 300.0, None)


def test_without_a_log_checkpoints_tell_the_steps_and_a_paused_run_loses_nothing_more() -> None:
    risk = work_at_risk(
        KNOWN, now=9e6, step=None, step_at=350.0, step_seconds=None, started=0.0, running=False, gpus=None
    )
    assert (risk.steps, risk.seconds) == (20, 250.0)


# --- schedules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "delay"), [(None, 0.0), (0.0, 0.0), (990.0, 90.0), (1000.0, 100.0), (99999.0, 100.0)]
)
def test_what_was_missed_is_caught_up_once_and_a_future_start_waits_one_period(
    last: float | None, delay: float
) -> None:
    assert first_delay(last, 100.0, 1000.0) == delay


def candidate(id: int, last: float | None, resume: Resume = Resume.EXACT) -> Candidate:
    return Candidate(id, id * 10, float(id), resume, last)


def test_known_bad_first_then_never_proven_newest_first_then_the_least_recent() -> None:
    known = [
        candidate(1, 50.0),
        candidate(2, None),
        candidate(3, None),
        candidate(4, 10.0),
        candidate(5, 90.0, Resume.UNSAFE),
    ]
    assert [c.id for c in by_need(known)] == [5, 3, 2, 4, 1]
    assert [c.id for c in due_again(known, 100.0, 60.0)] == [3, 2, 4]


def test_restores_take_the_newest_a_random_recent_one_or_every_nth() -> None:
    known = [candidate(n, None) for n in range(1, 7)] + [candidate(9, None, Resume.UNSAFE)]

    def picked(rule: str, chosen: list[Candidate]) -> int | None:
        found = pick_for_restore(chosen, rule, now=6.5, window=2.0, nth=2, choose=lambda some: some[0])
        return found.id if found else None

    assert picked("newest", known) == 6
    assert picked("random", known) == 5
    assert picked("every-nth", known) == 2
    assert picked("every-nth", [replace(c, last=1.0) for c in known]) is None


def test_scrubbing_reads_the_stalest_files_within_its_rate_and_its_coverage_is_a_share_of_bytes() -> None:
    extents = [Extent(1, "a", 60, 10.0), Extent(1, "b", 30, 90.0), Extent(2, "c", 10, 50.0)]
    assert [e.name for e in next_portion(extents, 70)] == ["a", "c"]
    assert [e.name for e in next_portion(extents, 1)] == ["a"]
    assert coverage(extents, 100.0, 60.0) == pytest.approx(0.4)
    assert coverage([], 100.0, 60.0) == 1.0
    day = 86400.0
    assert portion(10**13, 10 * day, 3600.0, 1e6) == 3_600_000_000
    assert portion(10**12, 10 * day, 3600.0, 1e9) == pytest.approx(10**12 / 240 * 1.25, rel=0.01)

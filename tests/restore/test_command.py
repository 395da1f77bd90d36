"""The user's own training command as a recipe, stopped from outside."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptguard.errors import RecipeError, TimedOut, UsageError
from ckptguard.restore import Request, validate
from ckptguard.restore.model import Limits
from ckptguard.restore.target import listing

SCRIPT = Path(__file__).parent / "recipes" / "plain_loop.py"
COMMAND = f"{sys.executable} {SCRIPT} {{out}} --resume {{checkpoint}} --slow 0.05"


def restore(checkpoint: Path, command: str = COMMAND, **options: object):
    options = {"metrics": "metrics.jsonl", "steps": 4, "repeats": 1, **options}
    return validate(Request(str(checkpoint), command=command, **options))  # type: ignore[arg-type]


def test_the_command_is_replayed_and_stopped(logged_run):
    before = listing(logged_run)
    report = restore(logged_run / "ckpt_12.pt")
    assert (report.result, report.bitwise) == ("continuous", True)
    assert [step.step for step in report.steps] == [13, 14, 15, 16]  # of 40 that it would have trained
    assert "state" in {gap.check for gap in report.not_run}
    assert listing(logged_run) == before


def test_a_checkpoint_that_only_this_command_refuses_is_blamed(logged_run, copy):
    run = copy(logged_run)
    path = run / "ckpt_12.pt"
    path.write_bytes(path.read_bytes()[:2000])
    report = restore(path)
    assert (report.result, report.exit_status) == ("failed", 1)
    assert (
        report.findings[0].code == "restore-failed"
        and "does resume from ckpt_6.pt" in report.findings[0].message
    )


def test_a_command_that_fails_on_every_checkpoint_is_blamed_itself(logged_run):
    with pytest.raises(
        RecipeError, match=r"ended with status 2 after step 12(?s:.)*unrecognized arguments: --nonsense"
    ):
        restore(logged_run / "ckpt_12.pt", COMMAND + " --nonsense")


def test_a_command_that_logs_nothing_runs_into_its_limit(logged_run):
    with pytest.raises(TimedOut):
        restore(
            logged_run / "ckpt_12.pt",
            f"{sys.executable} -c 'import time; time.sleep(60)' {{out}}",
            limits=Limits(timeout=0.5, grace=0.2),
        )


@pytest.mark.parametrize(
    "command, words",
    [
        ("python train.py {checkpoint}", "has no {out}"),
        ("no-such-program-here {out}", "there is no program"),
        ("python 'train.py {out}", "cannot be split"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_it_runs(logged_run, command, words):
    with pytest.raises(UsageError, match=words):
        restore(logged_run / "ckpt_12.pt", command)

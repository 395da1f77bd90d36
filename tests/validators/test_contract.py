"""Every check keeps the contract of checks."""

from __future__ import annotations

import pytest

from ckptguard.codes import CODES
from ckptguard.registry import checks, run_checks
from ckptguard.testing import CheckContract

EVERY = (*checks(), *run_checks())


@pytest.mark.parametrize("check", EVERY, ids=lambda c: c.name)
class TestEveryCheck(CheckContract):
    pass


def test_names_are_unique() -> None:
    names = [c.name for c in EVERY]
    assert len(names) == len(set(names))


# Found by commands and jobs, not by a check of an audit.
ELSEWHERE = {
    "check-failed": "written by the line itself when a check raises",
    "unknown-layout": "an audit that recognises nothing ends with exit status 2",
    "launch-mismatch": "needs the launch plan of preflight",
    **dict.fromkeys(
        (
            "restore-failed",
            "state-mismatch",
            "probe-mismatch",
            "batch-mismatch",
            "rng-stream-mismatch",
            "replay-divergence",
        ),
        "restore",
    ),
    **dict.fromkeys(
        ("upload-incomplete", "replica-mismatch", "orphaned-multipart", "upload-lag"), "replicas"
    ),
    **dict.fromkeys(
        ("retention-risk", "low-space", "missed-save", "stalled-save", "slow-save", "odd-size"),
        "the watching service",
    ),
    "loss-discontinuity": "diagnose",
}


def test_every_code_of_the_contract_is_found_by_something() -> None:
    found = {code for c in EVERY for code in c.codes}
    assert CODES.keys() - found - ELSEWHERE.keys() == set()

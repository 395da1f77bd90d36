"""Every check keeps the contract of checks."""

from __future__ import annotations

import pytest

from ckptguard.registry import checks, run_checks
from ckptguard.testing import CheckContract

EVERY = (*checks(), *run_checks())


@pytest.mark.parametrize("check", EVERY, ids=lambda c: c.name)
class TestEveryCheck(CheckContract):
    pass


def test_names_are_unique() -> None:
    names = [c.name for c in EVERY]
    assert len(names) == len(set(names))

"""When something is said, and when not: pure decisions."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ckptguard.catalog.troubles import (
    CROWD,
    Act,
    Decision,
    Standing,
    Trouble,
    backoff,
    crowd,
    decide,
    routed,
)
from ckptguard.model import Severity

BAD = Trouble(
    "r:c", "r", 1, "crc-mismatch", Severity.ERROR, "title", "message", "hint", 10.0, "r/checkpoint-3", 3
)
STANDS = Standing(7, "r:c", "crc-mismatch", Severity.ERROR, 10.0, 10.0)


def acts(decisions: list[Decision]) -> list[Act]:
    return [d.act for d in decisions]


def test_a_new_trouble_fires_once_and_its_end_is_said() -> None:
    assert acts(decide([BAD], [], 20.0, 3600)) == [Act.FIRE]
    assert decide([BAD], [STANDS], 20.0, 3600) == []
    assert acts(decide([], [STANDS], 20.0, 3600)) == [Act.RESOLVE]


def test_what_goes_on_is_said_again_at_the_interval_only() -> None:
    assert decide([BAD], [STANDS], 3609.0, 3600) == []
    assert acts(decide([BAD], [STANDS], 3610.0, 3600)) == [Act.REMIND]


def test_a_trouble_that_gets_louder_is_said_at_once_and_a_quieter_one_is_not() -> None:
    quiet = replace(STANDS, severity=Severity.WARNING)
    assert acts(decide([BAD], [quiet], 20.0, 3600)) == [Act.CHANGE]
    assert decide([replace(BAD, severity=Severity.WARNING)], [STANDS], 20.0, 3600) == []


def test_many_checkpoints_with_one_trouble_are_one_alert_and_the_single_ones_end_silently() -> None:
    many = [replace(BAD, key=f"r:c{n}", checkpoint=f"r/checkpoint-{n}") for n in range(CROWD + 1)]
    together = crowd(many)
    assert [t.key for t in together] == ["r:crc-mismatch"]
    assert together[0].message.startswith(f"{CROWD + 1} checkpoints")
    single = replace(STANDS, key="r:c0")
    assert acts(decide(together, [single], 20.0, 3600)) == [Act.FIRE, Act.ABSORB]
    assert len(crowd(many[:CROWD])) == CROWD


def test_routes_by_severity_run_and_code() -> None:
    route = {"least": Severity.WARNING, "runs": ["prod-*"], "codes": ["*"]}
    assert routed(Severity.ERROR, "crc-mismatch", ["/x", "prod-7b"], **route)
    assert not routed(Severity.INFO, "crc-mismatch", ["prod-7b"], **route)
    assert not routed(Severity.ERROR, "crc-mismatch", ["dev"], **route)


@given(st.lists(st.lists(st.sampled_from("abcd"), unique=True), max_size=12))
def test_whatever_comes_and_goes_every_firing_has_one_end(history: list[list[str]]) -> None:
    """Over any history, what was fired and not resolved is exactly what is wrong now."""
    standing: dict[str, Standing] = {}
    for now, wrong in enumerate(history):
        troubles = [replace(BAD, key=key) for key in wrong]
        for decision in decide(troubles, list(standing.values()), float(now), 1e9):
            if decision.act is Act.FIRE:
                assert decision.trouble is not None
                assert decision.trouble.key not in standing
                standing[decision.trouble.key] = replace(STANDS, key=decision.trouble.key, said_at=float(now))
            else:
                assert decision.standing is not None
                del standing[decision.standing.key]
        assert set(standing) == set(wrong)


def test_retries_slow_down_and_never_stop() -> None:
    waits = [backoff(n) for n in range(30)]
    assert waits == sorted(waits)
    assert waits[0] == 2.0
    assert waits[-1] == 600.0

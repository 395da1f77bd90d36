"""Optimizer state that vanished between two files of a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptguard.inspect import Options, audit
from ckptguard.model import Severity

torch = pytest.importorskip("torch")


def found(folder: Path, change: Callable[[dict[Any, Any]], object]) -> set[str]:
    """The codes of the alarms on the last of two checkpoints, whose optimizer states were changed."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 31):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (20, 30):
            state = copy.deepcopy(optimizer.state_dict())
            if step == 30:
                change(state["state"])
            torch.save(
                {"model": model.state_dict(), "optimizer": state, "step": step}, folder / f"ckpt_{step}.pt"
            )
    (report,) = audit(str(folder), Options(grace=0.0))
    return {f.code for f in report.checkpoints[-1].findings if f.severity > Severity.INFO}


def begin_anew(states: dict[Any, Any]) -> None:
    """Of an optimizer of ten steps, one parameter never had a gradient."""
    del states[1]
    states[0]["step"].fill_(10)


CASES: dict[str, tuple[Callable[[dict[Any, Any]], object], bool]] = {
    "as saved": (lambda s: None, False),
    "a parameter": (lambda s: s.pop(1), True),
    "a second moment": (lambda s: s[1].pop("exp_avg_sq"), True),
    "the steps of one": (lambda s: s[1].pop("step"), True),
    "begun anew": (begin_anew, False),
}


@pytest.mark.parametrize("what", CASES)
def test_lost_state_is_seen_and_a_fresh_start_is_none(what: str, tmp_path: Path) -> None:
    change, lost = CASES[what]
    assert ("missing-tensor" in found(tmp_path, change)) == lost

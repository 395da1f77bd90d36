"""What training does to weights in its ordinary course, and what must not be called frozen, stale or a jump."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptguard.testing_cases import Case, age

Holds = Callable[[Case, Path], list[str]]
Plan = Callable[[int, nn.Sequential], None]


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(24, 24) for _ in range(4))).to(dtype)


def only(layers: Iterable[int], net: nn.Sequential) -> None:
    """Train these layers; the others get no gradient, so that their optimizer state stays as it is."""
    chosen = set(layers)
    for place, layer in enumerate(net):
        for parameter in layer.parameters():
            parameter.requires_grad_(place in chosen)
            parameter.grad = None


def train(run: Path, net: nn.Sequential, optimizer: torch.optim.Optimizer, plan: Plan | None = None, **more: Any) -> None:  # fmt: skip
    for path in run.iterdir():
        path.unlink()
    for step in range(1, 41):
        optimizer.zero_grad()
        if plan is not None:
            plan(step, net)
        x = torch.randn(8, 24, dtype=net[0].weight.dtype)
        (net(x) - x).square().mean().backward()
        optimizer.step()
        if step % 10 == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step, **more}
            torch.save({**state, "rng": torch.get_rng_state()}, run / f"ckpt_{step}.pt")
    age(run, [run / f"ckpt_{n}.pt" for n in (10, 20, 30, 40)])


def zero_beginning(run: Path) -> None:
    """Layers that start from zero grow a thousandfold in their first steps."""
    net = model()
    for parameter in net[3].parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6)
    train(
        run, net, optimizer, lambda step, n: optimizer.param_groups[0].update(lr=1e-6 if step <= 10 else 1e-3)
    )


def unfrozen_one_by_one(run: Path) -> None:
    net = model()
    train(
        run,
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-3),
        lambda s, n: only(range(3 - (s - 1) // 10, 4), n),
    )


def a_layer_at_a_time(run: Path) -> None:
    """Only one layer and the last are trained between two saves."""
    net = model()
    train(run, net, torch.optim.AdamW(net.parameters(), lr=1e-3), lambda s, n: only([(s - 1) // 10, 3], n))


def a_rate_of_zero(run: Path) -> None:
    net = model()
    groups = [{"params": net[0].parameters(), "lr": 0.0}, {"params": net[1:].parameters(), "lr": 1e-3}]
    train(run, net, torch.optim.AdamW(groups))


def steps_lost_in_bf16(run: Path) -> None:
    net = model(torch.bfloat16)
    train(run, net, torch.optim.AdamW(net.parameters(), lr=1e-9, weight_decay=0.0))


def a_schedule_at_its_end(run: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    train(
        run, net, optimizer, lambda step, n: optimizer.param_groups[0].update(lr=1e-3 if step < 20 else 0.0)
    )


@pytest.mark.parametrize(
    "make",
    [zero_beginning, unfrozen_one_by_one, a_layer_at_a_time, a_rate_of_zero, steps_lost_in_bf16, a_schedule_at_its_end],
)  # fmt: skip
def test_is_silent(make: Callable[[Path], None], holds: Holds, plain_run: Path) -> None:
    expect = {f"ckpt_{n}.pt": "exact" for n in (10, 20, 30, 40)}
    assert holds(Case(make.__name__, make, expect, "ckpt_40.pt"), plain_run) == []

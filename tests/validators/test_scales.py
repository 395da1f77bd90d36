"""Scales of eight-bit weights, in files that torch itself wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptguard.inspect import Options, audit
from ckptguard.model import Severity

torch = pytest.importorskip("torch")


def found(folder: Path, change: Callable[[dict[str, Any]], object]) -> set[str]:
    """The codes of the alarms on a file with eight-bit weights, their scales and the inverses of these."""
    torch.manual_seed(0)
    scale = torch.rand(4, 1) + 0.5
    weights = {
        "layer.weight": torch.randn(64, 32).to(torch.float8_e4m3fn), "layer.weight_scale": scale, "layer.weight_scale_inv": 1 / scale,
        "norm.weight": torch.ones(32), "mask": torch.full((4, 4), float("-inf")).triu(1),
    }  # fmt: skip
    change(weights)
    torch.save({"model": weights, "step": 3}, folder / "model_step_3.pt")
    (report,) = audit(str(folder), Options(grace=0.0))
    return {f.code for v in report.checkpoints for f in v.findings if f.severity > Severity.INFO}


CASES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "as saved": (lambda w: None, ""),
    "rounded": (lambda w: w["layer.weight_scale"].mul_(1.001), ""),
    "a block of zeros": (lambda w: (w["layer.weight_scale"][0].zero_(), w.pop("layer.weight_scale_inv")), ""),
    "of another save": (lambda w: w["layer.weight_scale"].mul_(1.5), "mixed-saves"),
    "one of another save": (lambda w: w["layer.weight_scale_inv"][2].mul_(3.0), "mixed-saves"),
    "zero": (lambda w: (w["layer.weight_scale"].zero_(), w.pop("layer.weight_scale_inv")), "zero-weights"),
    "negative": (lambda w: (w["layer.weight_scale"].neg_(), w["layer.weight_scale_inv"].neg_()), "zero-weights"),
    "infinite": (lambda w: w["layer.weight_scale_inv"].fill_(float("inf")), "nonfinite-weights"),
    "NaN": (lambda w: w["layer.weight_scale_inv"][1].fill_(float("nan")), "nonfinite-weights"),
    "a norm of nothing but infinity": (lambda w: w["norm.weight"].fill_(float("inf")), "nonfinite-weights"),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_scales(what: str, tmp_path: Path) -> None:
    change, code = CASES[what]
    alarms = found(tmp_path, change) - {"missing-optimizer"}
    assert alarms == ({code} if code else set())

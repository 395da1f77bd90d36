"""A function that returns a Lightning (Trainer, module, data): a real run of the real library."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("torchdata")
pytestmark = pytest.mark.lightning
RECIPES = Path(__file__).parent / "recipes"


def test_a_whole_checkpoint_goes_on_and_a_damaged_one_is_named(here, recipe, tmp_path, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setenv("TEST_OUTPUT", str(run))
    import lightning_loop

    trainer, module, data = lightning_loop.make()
    trainer.fit(module, data)
    monkeypatch.setenv("TEST_OUTPUT", str(tmp_path / "elsewhere"))
    checkpoint = run / "checkpoints" / "step=12.ckpt"
    report = here(checkpoint, recipe("lightning_loop:make"), steps=4)
    assert (report.result, report.bitwise, report.layout) == ("continuous", True, "lightning")
    assert {"rng"} <= {gap.check for gap in report.not_run}
    assert not (tmp_path / "elsewhere").exists()

    import torch

    state = torch.load(checkpoint, weights_only=False)
    state["optimizer_states"][0]["state"] = {}
    torch.save(state, checkpoint)
    report = here(checkpoint, recipe("lightning_loop:make"), steps=4)
    # What the file holds was restored: that it lost the moments shows in the steps.
    assert (report.result, report.noise.calibrated_on) == ("diverged", "step=6.ckpt")
    assert report.findings[0].code == "replay-divergence"

"""Recipes that leave parts out, name them otherwise, or are wrong: each is told apart from the checkpoint."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from ckptguard.errors import MissingExtra, RecipeError, UsageError
from ckptguard.restore.request import Request
from ckptguard.restore.validation import validate
from tests.restore.conftest import RECIPES


@pytest.fixture(scope="session")
def two_optimizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 steps with two optimizers, logged, with a checkpoint every 6."""
    run = tmp_path_factory.mktemp("two") / "run"
    sys.path.insert(0, str(RECIPES))
    try:
        spec = importlib.util.spec_from_file_location("odd_loops", RECIPES / "odd_loops.py")
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    finally:
        sys.path.remove(str(RECIPES))
    made.train_two(run, steps=24, every=6)
    return run


def test_two_optimizers_go_on_bit_for_bit(here, recipe, two_optimizers):
    report = here(two_optimizers / "ckpt_12.pt", recipe("odd_loops:TwoOptimizers"))
    assert (report.result, report.bitwise) == ("continuous", True)
    assert not report.findings


def test_an_optimizer_that_is_no_part_is_named_and_is_no_gap_between_machines(here, recipe, two_optimizers):
    report = here(two_optimizers / "ckpt_12.pt", recipe("odd_loops:LeavesOneOut"))
    # It deviates by less than a gap may be, and in the same way on every checkpoint.
    assert (report.result, report.noise.calibrated_on) == ("unproven", None)
    left_out, replay = report.findings[:2]
    assert (left_out.code, left_out.severity) == ("state-mismatch", "warning")
    assert "holds optimizer_vectors, which the recipe does not restore" in left_out.message
    assert "the recipe does not restore optimizer_vectors" in replay.message


def test_parts_of_own_names_are_compared_where_the_recipe_loads_them_itself(here, recipe, recorded_run):
    report = here(recorded_run / "ckpt_12.pt", recipe("odd_loops:OwnNames"))
    assert (report.result, report.bitwise, report.findings) == ("continuous", True, ())
    report = here(recorded_run / "ckpt_12.pt", recipe("odd_loops:OwnNamesForgets"))
    assert report.result == "failed"
    assert report.findings[0].code == "state-mismatch" and "15 values" in report.findings[0].message


def test_state_that_was_cast_is_the_finding_though_the_steps_then_fail(here, recipe, logged_run):
    report = here(logged_run / "ckpt_12.pt", recipe("odd_loops:Casts"))
    assert (report.result, report.exit_status) == ("failed", 1)
    assert report.findings[0].code == "state-mismatch" and "another dtype" in report.findings[0].message
    why = [gap.why for gap in report.not_run if gap.check == "replay"]
    assert len(why) == 1 and "the recipe raised RuntimeError: expected scalar type" in why[0]


def test_a_load_that_fails_on_every_checkpoint_is_the_recipes_fault(here, recipe, logged_run, tmp_path):
    said = (
        r"load\(\) raised AttributeError: module 'torch' has no attribute 'lode' \(odd_loops\.py, line \d+\)"
    )
    with pytest.raises(RecipeError, match=said) as caught:
        here(logged_run / "ckpt_12.pt", recipe("odd_loops:Mistyped"))
    assert "does not load ckpt_6.pt either" in caught.value.hint
    alone = tmp_path / "ckpt_12.pt"
    alone.write_bytes((logged_run / "ckpt_12.pt").read_bytes())
    with pytest.raises(RecipeError, match=said) as caught:
        here(alone, recipe("odd_loops:Mistyped"))
    assert "the checkpoint itself is sound" in caught.value.hint


def test_a_load_that_fails_on_this_checkpoint_alone_speaks_against_it(here, recipe, logged_run, copy):
    run = copy(logged_run)
    state = torch.load(run / "ckpt_12.pt", weights_only=False)
    del state["scheduler"]
    torch.save(state, run / "ckpt_12.pt")
    report = here(run / "ckpt_12.pt", recipe("odd_loops:NeedsAll"))
    assert (report.result, report.findings[0].code) == ("failed", "restore-failed")
    assert "KeyError: 'scheduler'" in report.findings[0].message
    assert "It does load ckpt_6.pt" in report.findings[0].message


@pytest.mark.parametrize(
    "name, words",
    [
        ("StepOfText", r"step\(\) returned str as step; expected one number"),
        ("ProbeOfNothing", r"probe\(\) returned None; expected one number"),
        ("ProbeOfText", r"probe\(\) returned str as loss; expected one number"),
    ],
)
def test_nonsense_that_a_recipe_returns_is_its_own_fault(here, recipe, logged_run, name, words):
    with pytest.raises(RecipeError, match=words) as caught:
        here(logged_run / "ckpt_12.pt", recipe(f"odd_loops:{name}"))
    assert "ckptguard/restore" not in caught.value.hint  # lines of ours tell the reader nothing


def test_a_batch_that_nothing_can_be_read_of_is_not_compared(here, recipe, recorded_run):
    report = here(recorded_run / "ckpt_12.pt", recipe("odd_loops:OpaqueBatch"))
    assert report.result == "continuous"
    assert "batches" in {gap.check for gap in report.not_run}


def test_a_recipe_that_ends_the_process_with_0_has_proven_nothing(recipe, logged_run):
    request = Request(str(logged_run / "ckpt_12.pt"), recipe=recipe("odd_loops:Vanishes"))
    with pytest.raises(RecipeError, match="the child process ended with 0 before it was done"):
        validate(request)


@pytest.mark.parametrize(
    "device, words", [("abacus", "no such kind of device"), ("cuda:99", r"torch sees \d+ CUDA devices")]
)
def test_a_device_that_is_not_there_is_no_fault_of_the_recipe(here, recipe, logged_run, device, words):
    with pytest.raises(UsageError, match=f"--device {device}: {words}"):
        here(logged_run / "ckpt_12.pt", recipe("plain_loop:Loop"), device=device)


def test_a_run_is_no_checkpoint(here, recipe, logged_run):
    with pytest.raises(UsageError, match=r"is no checkpoint, it holds several, such as ckpt_24\.pt"):
        here(logged_run, recipe("plain_loop:Loop"))


def test_a_log_that_was_named_and_holds_no_step_is_refused(here, recipe, logged_run, tmp_path):
    (tmp_path / "notes.txt").write_text("nothing here\n")
    with pytest.raises(UsageError, match="no step of a training can be read from it"):
        here(logged_run / "ckpt_12.pt", recipe("plain_loop:Loop"), log=str(tmp_path / "notes.txt"))


def test_without_torch_the_extra_is_named(recipe, logged_run, tmp_path, monkeypatch):
    """An installation without torch, as its import system says it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            raise ModuleNotFoundError('No module named torch', name='torch')\n"
        "sys.meta_path.insert(0, Without())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MissingExtra, match="restoring with a recipe needs the package torch") as caught:
        validate(Request(str(logged_run / "ckpt_12.pt"), recipe=recipe("plain_loop:Loop")))
    assert caught.value.hint == "pip install 'ckptguard[torch]'"

"""A function that returns a Hugging Face Trainer: a real run of the real library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptguard.errors import RecipeError
from ckptguard.restore import Request, validate
from ckptguard.restore.target import listing

pytestmark = pytest.mark.hf


def train(recipes: Path, run: Path, maker: str) -> Path:
    """A training of 24 steps, two micro-batches each, saved every 5."""
    sys.path.insert(0, str(recipes))
    os.environ["TEST_OUTPUT"] = str(run)
    try:
        import hf_trainer

        getattr(hf_trainer, maker)().train()
    finally:
        sys.path.remove(str(recipes))
        del os.environ["TEST_OUTPUT"]
    return run


RECIPES = Path(__file__).parent / "recipes"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(RECIPES, tmp_path_factory.mktemp("hf") / "out", "make_trainer")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The recipe's own output directory is relative: nothing may appear there."""
    monkeypatch.chdir(tmp_path)
    yield
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith(("trial-", "copy-"))]
    assert left == []


def test_a_whole_checkpoint_goes_on_bit_for_bit_in_a_child_process(recipe, run):
    before = listing(run)
    report = validate(Request(str(run / "checkpoint-15"), recipe=recipe("hf_trainer:make_trainer")))
    assert (report.result, report.bitwise, report.evidence) == ("continuous", True, "replayed")
    assert not report.findings and report.against == "checkpoint-20"
    assert [step.step for step in report.steps] == list(range(16, 24))
    assert all({"loss", "grad_norm", "lr"} == set(step.logged) for step in report.steps)
    assert listing(run) == before


@pytest.mark.parametrize(
    "lost, result, code, words",
    [
        (
            "scheduler.pt",
            "failed",
            "state-mismatch",
            "optimizer: 84 values are in the file, but not in the restored",
        ),
        ("optimizer.pt", "failed", "state-mismatch", "the checkpoint holds nothing for optimizer"),
        ("rng_state.pth", "diverged", "rng-stream-mismatch", "no state of the random generators"),
        ("trainer_state.json", "failed", "restore-failed", "trainer_state.json"),
        ("model.safetensors", "failed", "restore-failed", "Can't find a valid checkpoint"),
    ],
)
def test_a_lost_file_is_named(here, recipe, run, copy, lost, result, code, words):
    damaged = copy(run)
    (damaged / "checkpoint-15" / lost).unlink()
    report = here(damaged / "checkpoint-15", recipe("hf_trainer:make_trainer"))
    assert (report.result, report.exit_status) == (result, 1)
    assert report.findings[0].code == code and words in report.findings[0].message
    if lost in ("scheduler.pt", "optimizer.pt"):
        assert "only where both are there" in report.findings[0].hint
        named = {f.message.split(":")[0] for f in report.findings if f.code == "state-mismatch"}
        assert {"optimizer", "scheduler"} <= {word for name in named for word in name.split()}
        assert "replay-divergence" in [f.code for f in report.findings]


def test_a_log_of_means_is_compared_as_such(here, recipe, run, copy):
    sparse = copy(run)
    for state in sparse.glob("checkpoint-*/trainer_state.json"):
        content = json.loads(state.read_text())
        rows = content["log_history"]
        means = []
        for at in range(5, len(rows) + 1, 5):
            last = dict(rows[at - 1])
            last["loss"] = sum(row["loss"] for row in rows[at - 5 : at]) / 5
            means.append(last)
        content["log_history"], content["logging_steps"] = means, 5
        state.write_text(json.dumps(content))
    report = here(sparse / "checkpoint-15", recipe("hf_trainer:make_trainer_sparse"))
    assert report.result == "continuous"
    assert [(step.step, step.span) for step in report.steps if "loss" in step.logged] == [(20, 5)]


def test_adapters_are_compared_by_the_names_they_are_saved_by(here, recipe, tmp_path_factory):
    pytest.importorskip("peft")
    run = train(RECIPES, tmp_path_factory.mktemp("lora") / "out", "make_lora_trainer")
    report = here(run / "checkpoint-15", recipe("hf_trainer:make_lora_trainer"), steps=4)
    assert (report.result, report.bitwise, report.findings) == ("continuous", True, ())


def test_a_model_that_does_not_fit_a_checkpoint_which_fits_its_config_is_the_recipes_fault(
    here, recipe, run, copy
):
    alone = copy(run)
    for other in ("checkpoint-20", "checkpoint-24"):
        shutil.rmtree(alone / other)
    with pytest.raises(RecipeError, match=r"model does not fit.*size mismatch") as raised:
        here(alone / "checkpoint-15", recipe("hf_trainer:make_wider_trainer"))
    assert "fits its own config.json" in raised.value.hint


def test_what_several_processes_trained_is_not_accused_by_one(here, recipe, run, copy):
    several = copy(run)
    for checkpoint in several.glob("checkpoint-*"):
        shutil.copy2(checkpoint / "rng_state.pth", checkpoint / "rng_state_1.pth")
        (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    report = here(several / "checkpoint-15", recipe("hf_trainer:make_trainer"), steps=2)
    assert (report.result, report.findings) == ("unproven", ())
    assert any("2 processes trained it" in gap.why for gap in report.not_run)


@pytest.mark.soak
def test_two_processes_go_on_as_two_did(recipe, tmp_path):
    output = tmp_path / "copy-run"
    script = f"import sys; sys.path.insert(0, {str(RECIPES)!r}); import hf_trainer; hf_trainer.make_trainer().train()"
    (tmp_path / "copy-train.py").write_text(script)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "TEST_OUTPUT": str(output)}
    subprocess.run(
        [*launcher, str(tmp_path / "copy-train.py")], env=env, check=True, capture_output=True, timeout=200
    )
    report = validate(
        Request(str(output / "checkpoint-15"), recipe=recipe("hf_trainer:make_trainer"), steps=4, nproc=2)
    )
    assert (report.result, report.bitwise) == ("continuous", True)

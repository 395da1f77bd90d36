"""A plain torch loop, restored by a recipe: what is whole is proven, every fault is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from ckptguard.errors import RecipeError
from ckptguard.restore.target import listing


def codes(report, severity=("warning", "error")):
    return [f.code for f in report.findings if f.severity in severity]


def rewrite(path: Path, change) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def test_a_whole_checkpoint_goes_on_bit_for_bit(here, recipe, recorded_run):
    before = listing(recorded_run)
    report = here(recorded_run / "ckpt_12.pt", recipe("plain_loop:Loop"))
    assert (report.result, report.bitwise, report.evidence) == ("continuous", True, "replayed")
    assert not report.findings and not report.not_run
    assert report.checks == 7  # loads, state, generators, batches, probe, steps, later checkpoint
    assert [step.step for step in report.steps] == list(range(13, 21))
    assert all(set(s.logged) == {"loss", "grad_norm", "lr", "loss_scale"} for s in report.steps)
    assert all(s.logged["loss"] == s.replayed["loss"] and s.tolerance["loss"] == 0 for s in report.steps)
    assert report.against == "ckpt_18.pt" and report.noise.repeats == 2
    assert listing(recorded_run) == before


def test_without_a_seal_it_says_what_was_not_proven(here, recipe, logged_run):
    report = here(logged_run / "ckpt_12.pt", recipe("plain_loop:Loop"))
    assert (report.result, report.bitwise) == ("continuous", True)
    assert {gap.check for gap in report.not_run} == {"seal", "rng-draws", "batches", "probe"}


def test_the_newest_checkpoint_without_any_later_step_is_unproven(here, recipe, logged_run):
    report = here(logged_run / "ckpt_24.pt", recipe("plain_loop:Loop"))
    assert (report.result, report.exit_status) == ("unproven", 3)
    assert {"replay", "against"} <= {gap.check for gap in report.not_run}
    assert report.compared and not report.findings  # the state itself was compared


def test_a_later_checkpoint_proves_it_without_a_log(here, recipe, logged_run, copy):
    run = copy(logged_run)
    (run / "metrics.jsonl").unlink()
    report = here(run / "ckpt_6.pt", recipe("plain_loop:Loop"), against=str(run / "ckpt_18.pt"))
    assert (report.result, report.bitwise, report.steps) == ("continuous", True, ())


@pytest.mark.parametrize("damage", ["truncated", "flipped", "other weights"])
def test_a_later_checkpoint_that_is_damaged_is_no_evidence_against_this_one(
    here, recipe, logged_run, copy, damage
):
    run = copy(logged_run)
    path = run / "ckpt_18.pt"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-3000])
    elif damage == "flipped":
        weight = torch.load(path, weights_only=False)["model"]["body.0.weight"]
        content = bytearray(path.read_bytes())
        content[content.find(weight.numpy().tobytes()) + 100] ^= 1
        path.write_bytes(content)
    else:
        rewrite(path, lambda state: state["model"]["body.0.bias"].add_(0.01))
    report = here(run / "ckpt_12.pt", recipe("plain_loop:Loop"))
    assert report.result == "continuous"
    if damage == "other weights":
        assert "it is ckpt_18.pt that holds other state" in report.findings[0].message
    else:
        assert not report.findings and "against" in {gap.check for gap in report.not_run}


def test_recorded_batches_replace_the_data_pipeline(here, recipe, recorded_run):
    report = here(recorded_run / "ckpt_12.pt", recipe("plain_loop:OnRecordedBatches"), steps=4)
    assert (report.result, report.bitwise) == ("continuous", True)
    assert [f.severity for f in report.findings] == [
        "warning"
    ]  # the loader's state is there, and was not restored
    assert "dataloader" in report.findings[0].message


@pytest.mark.parametrize(
    "name, words", [("ForgetsMoments", "15 values are in the file"), ("Half", "another value")]
)
def test_resume_code_that_loses_state_is_named(here, recipe, logged_run, name, words):
    report = here(logged_run / "ckpt_12.pt", recipe(f"plain_loop:{name}"))
    assert (report.result, report.exit_status) == ("failed", 1)
    assert report.findings[0].code == "state-mismatch" and words in report.findings[0].message
    assert "replay-divergence" in codes(report)


def test_another_schedule_is_seen_by_its_rate(here, recipe, logged_run):
    report = here(logged_run / "ckpt_12.pt", recipe("plain_loop:OtherRate"))
    assert report.result == "failed"
    replay = next(f for f in report.findings if f.code == "replay-divergence")
    assert replay.subject == "step 14" and "lr 0.01 replayed" in replay.message


@pytest.mark.parametrize("lost", ["optimizer", "scheduler", "scaler", "dataloader"])
def test_a_component_that_the_file_lost_is_named(here, recipe, recorded_run, copy, lost):
    run = copy(recorded_run)
    rewrite(run / "ckpt_12.pt", lambda state: state.pop(lost))
    report = here(run / "ckpt_12.pt", recipe("plain_loop:Loop"))
    assert report.result == "failed"
    assert report.findings[0].message.startswith(f"the checkpoint holds nothing for {lost}")


def test_a_skipped_batch_diverges_although_the_file_is_whole(here, recipe, recorded_run, copy):
    run = copy(recorded_run)

    def skip(state):
        del state["dataloader"]["order"][:4]

    rewrite(run / "ckpt_12.pt", skip)
    report = here(run / "ckpt_12.pt", recipe("plain_loop:Loop"))
    assert report.result == "diverged"
    assert codes(report)[0] == "batch-mismatch"
    assert "1 step ahead" in report.findings[0].message


def test_other_random_generators_are_named(here, recipe, logged_run, copy):
    run = copy(logged_run)
    rewrite(run / "ckpt_12.pt", lambda state: state.pop("rng"))
    report = here(run / "ckpt_12.pt", recipe("plain_loop:Loop"))
    # Nothing recorded says which machine trained: an earlier checkpoint replays exactly, so it is not the machine.
    assert (report.result, report.noise.calibrated_on) == ("diverged", "ckpt_6.pt")
    assert codes(report) == ["rng-stream-mismatch", "replay-divergence"]


def test_swapped_generators_are_seen_by_their_draws(here, recipe, recorded_run, copy):
    run = copy(recorded_run)
    other = torch.load(run / "ckpt_6.pt", weights_only=False)["rng"]
    stamp = (run / "ckpt_12.pt").stat()
    rewrite(run / "ckpt_12.pt", lambda state: state.update(rng=other))
    os.utime(run / "ckpt_12.pt", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    report = here(run / "ckpt_12.pt", recipe("plain_loop:Loop"))
    assert report.result == "failed"
    assert codes(report)[0] == "rng-stream-mismatch" and "torch" in report.findings[0].subject


def test_a_device_that_does_not_repeat_gets_a_measured_tolerance(here, recipe, logged_run):
    report = here(logged_run / "ckpt_12.pt", recipe("plain_loop:Noisy"), steps=4)
    assert (report.result, report.bitwise) == ("continuous", False)
    assert report.noise.largest("loss") > 0
    assert 0 < max(step.tolerance["loss"] for step in report.steps) < 1e-3


def test_a_gap_that_no_checkpoint_can_measure_leaves_it_unproven(here, recipe, logged_run, copy):
    run = copy(logged_run)
    for name in ("ckpt_6.pt", "ckpt_18.pt", "ckpt_24.pt"):
        (run / name).unlink()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "loss": row["loss"] + 1e-6} for row in rows]  # as another machine might have computed it
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = here(run / "ckpt_12.pt", recipe("plain_loop:Loop"), steps=4)
    assert (report.result, report.exit_status) == ("unproven", 3)
    assert report.noise.repeats == 4  # so small a difference might have been noise
    assert report.findings[0].effect == "unknown" and "not known how far" in report.findings[0].message


def test_a_model_that_is_not_the_trained_one_is_the_recipes_fault(here, recipe, logged_run):
    with pytest.raises(RecipeError, match=r"the recipe's model does not fit: ckpt_12\.pt: .*size mismatch"):
        here(logged_run / "ckpt_12.pt", recipe("plain_loop:WiderModel"))


def test_a_checkpoint_with_a_weight_of_its_own_shape_is_refused(here, recipe, logged_run, copy):
    run = copy(logged_run)
    rewrite(run / "ckpt_12.pt", lambda s: s["model"].update({"body.0.bias": torch.zeros(31)}))
    report = here(run / "ckpt_12.pt", recipe("plain_loop:Loop"))
    assert (report.result, report.evidence) == ("failed", "restored")
    assert codes(report) == ["restore-failed"] and "body.0.bias" in report.findings[0].message


def test_a_truncated_file_is_refused_with_the_readers_words(here, recipe, logged_run, copy):
    run = copy(logged_run)
    path = run / "ckpt_12.pt"
    path.write_bytes(path.read_bytes()[:-4000])
    report = here(path, recipe("plain_loop:Loop"))
    assert (report.result, codes(report)) == ("failed", ["restore-failed"])


def test_a_recipe_that_raises_is_told_apart_from_the_checkpoint(here, recipe, logged_run):
    with pytest.raises(
        RecipeError, match=r"the recipe raised KeyError: 'tokens' \(plain_loop\.py, line \d+\)"
    ):
        here(logged_run / "ckpt_12.pt", recipe("plain_loop:Raises"))


@pytest.mark.parametrize(
    "spec, words",
    [
        ("plain_loop:Nope", "there is no Nope"),
        ("plain_loop:VOCAB", "a int is no recipe"),
        ("plain_loop:train", "needs the arguments run, steps, every"),
        ("missing:Loop", "no such file"),
    ],
)
def test_a_name_that_is_no_recipe_says_what_there_is(here, recipe, logged_run, spec, words):
    with pytest.raises(RecipeError, match=words):
        here(logged_run / "ckpt_12.pt", recipe(spec))

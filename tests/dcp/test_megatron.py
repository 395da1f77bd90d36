"""Megatron-LM, Megatron-Bridge and NeMo: healthy runs are silent, and every damage is seen where it is."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptguard.layouts._base import build_directory
from ckptguard.megatron_integrity import write_integrity
from ckptguard.model import Evidence, Resume, RunReport, Severity, Verdict
from ckptguard.registry import layout_named
from ckptguard.storage.local import LocalStore
from ckptguard.testing_damage import drop, empty, flip, resave, swap

pytestmark = pytest.mark.megatron
Look = Callable[..., RunReport]
Judge = Callable[..., Verdict]
Copy = Callable[[Path], Path]
RUNS = {
    "torch_dist": "megatron",
    "new-core": "megatron",
    "bridge": "megatron-bridge",
    "nemo": "nemo",
    "legacy": "megatron",
}


def codes(verdict: Verdict, least: Severity = Severity.WARNING) -> set[str]:
    return {f.code for f in verdict.findings if f.severity >= least}


@pytest.mark.parametrize("depth", [Evidence.LISTING, Evidence.STRUCTURE, Evidence.CONTENT])
def test_healthy_runs_are_silent(megatron_runs: Path, look: Look, depth: Evidence) -> None:
    for name, layout in RUNS.items():
        report = look(megatron_runs / name, depth)
        assert [v.layout for v in report.checkpoints] == [layout, layout]
        assert not [f for f in report.findings if f.loud], name
        assert not [f for v in report.checkpoints for f in v.findings if f.loud], name
        if depth is not Evidence.LISTING:
            assert [v.step for v in report.checkpoints] == [2, 4]
            assert {v.resume for v in report.checkpoints} == {Resume.EXACT}
            assert report.checkpoints[0].gaps == ("dataloader",)


# --- damage -------------------------------------------------------------------------------------------


def change_common(folder: Path, change: Callable[[dict[str, Any]], None], name: str = "common.pt") -> None:
    import torch

    state = torch.load(folder / name, weights_only=False)
    change(state)
    torch.save(state, folder / name)


def other_iteration(folder: Path) -> None:
    change_common(folder, lambda c: c.update(iteration=3))


def schedule_behind(folder: Path) -> None:
    change_common(folder, lambda c: c["opt_param_scheduler"].update(num_steps=16))


def samples_of_another_step(folder: Path) -> None:
    def change(common: dict[str, Any]) -> None:
        common["args"].consumed_train_samples = 16
        common["opt_param_scheduler"]["num_steps"] = 16

    change_common(folder, change)


def topology_of_another_run(folder: Path) -> None:
    change_common(folder, lambda c: vars(c["args"]).update(tensor_model_parallel_size=4, world_size=4))


def generator_of_one_rank_lost(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: TID251 - our own file
    name = "rng_state/shard_0.1_1.2"
    del metadata.state_dict_metadata[name]
    for key in [k for k in metadata.storage_data if k.fqn == name]:
        del metadata.storage_data[key]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def rate_of_another_run(folder: Path) -> None:
    change_common(folder, lambda c: c["optimizer"]["optimizer"]["param_groups"][0].update(lr=0.5))


def stale_mark(folder: Path) -> None:
    """`metadata.json` of a finished save, data of a later one that was not."""
    at = (folder / "__0_0.distcp").stat().st_mtime - 7200
    os.utime(folder / "metadata.json", (at, at))


def older_shard(folder: Path) -> None:
    shutil.copyfile(folder.parent / "iter_0000002" / "__1_1.distcp", folder / "__1_1.distcp")


def ranks_file(folder: Path, rank: int) -> Path:
    return folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"


def change_rank(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """What only the second tensor-parallel rank's file says."""
    resave(ranks_file(folder, 1), lambda state: change(state) and None)


def drifted(share: float) -> Callable[[Path], None]:
    """A norm that differs between the ranks, number by number, up and down."""

    def change(state: dict[str, Any]) -> None:
        norm = state["model"]["decoder.final_layernorm.weight"].data
        norm[::2] *= 1 + share
        norm[1::2] *= 1 - share

    return lambda folder: change_rank(folder, change)


DAMAGE: dict[str, tuple[str, Callable[[Path], None], set[str], str]] = {
    "the optimizer's groups gone": ("torch_dist", lambda f: change_common(f, lambda c: c.pop("optimizer")), {"missing-optimizer"}, "common.pt"),
    "arguments gone": ("torch_dist", lambda f: change_common(f, lambda c: c.pop("args")), {"missing-trainer-state"}, "iter_0000004"),
    "a step of the train state": ("bridge", lambda f: change_common(f, lambda c: c["step"].fill_(3), "train_state.pt"), {"step-mismatch"}, "train_state.pt"),
    "one rank's file twice": ("legacy", lambda f: shutil.copyfile(ranks_file(f, 0), ranks_file(f, 1)), {"missing-rank"}, "mp_rank_01"),
    "ranks that changed places": ("legacy", lambda f: swap(ranks_file(f, 0), ranks_file(f, 1)), {"topology-mismatch"}, "mp_rank_00"),
    "a rank's rate": ("legacy", lambda f: change_rank(f, lambda s: s["optimizer"]["optimizer"]["param_groups"][0].update(lr=9.0)), {"rank-divergence"}, "mp_rank_01"),
    "a norm that drifted apart": ("legacy", drifted(1e-2), {"rank-divergence"}, "mp_rank_01"),
    "a rank without its optimizer": ("legacy", lambda f: change_rank(f, lambda s: s.pop("optimizer")), {"missing-rank"}, "mp_rank_01"),
    "a rank without its generators": ("legacy", lambda f: change_rank(f, lambda s: s.pop("rng_state")), {"missing-rng"}, "mp_rank_01"),
    "common.pt gone": ("torch_dist", lambda f: drop(f / "common.pt"), {"missing-file"}, "common.pt"),
    "metadata.json gone": ("torch_dist", lambda f: drop(f / "metadata.json"), {"incomplete-save"}, "metadata.json"),
    "mark gone, new core": ("new-core", lambda f: drop(f / "metadata.json"), {"incomplete-save"}, "metadata.json"),
    "metadata.json empty": ("torch_dist", lambda f: empty(f / "metadata.json"), {"empty-file"}, "metadata.json"),
    "metadata.json of something else": ("torch_dist", lambda f: (f / "metadata.json").write_text("{}"), {"bad-header"}, "metadata.json"),
    ".metadata gone": ("torch_dist", lambda f: drop(f / ".metadata"), {"incomplete-save"}, ".metadata"),
    "shard gone": ("torch_dist", lambda f: drop(f / "__1_0.distcp"), {"missing-file"}, "__1_0.distcp"),
    "bit in a shard": ("torch_dist", lambda f: flip(f / "__0_0.distcp", 5000), {"crc-mismatch", "bad-header"}, "__0_0.distcp"),
    "bit in common.pt": ("torch_dist", lambda f: flip(f / "common.pt", record="common/data.pkl"), {"crc-mismatch", "bad-header"}, "common.pt"),
    "another iteration": ("torch_dist", other_iteration, {"step-mismatch"}, "common.pt"),
    "schedule of another step": ("torch_dist", schedule_behind, {"step-mismatch"}, "common.pt"),
    "samples of another step": ("torch_dist", samples_of_another_step, {"data-position-mismatch"}, "common.pt"),
    "topology of another run": ("torch_dist", topology_of_another_run, {"topology-mismatch"}, "iter_0000004"),
    "rate of another run": ("torch_dist", rate_of_another_run, {"lr-mismatch"}, "common.pt"),
    "a rank's generator lost": ("torch_dist", generator_of_one_rank_lost, {"missing-rank"}, "rng_state"),
    "stale completion mark": ("torch_dist", stale_mark, {"mixed-saves"}, ".distcp"),
    "shard of an earlier iteration": ("torch_dist", older_shard, {"mixed-saves"}, "__1_1.distcp"),
    "train_state.pt gone": ("bridge", lambda f: drop(f / "train_state.pt"), {"incomplete-save"}, "train_state.pt"),
    "train state of another step": ("bridge", lambda f: shutil.copyfile(f.parent / "iter_0000002" / "train_state.pt", f / "train_state.pt"), {"step-mismatch", "data-position-mismatch"}, "train_state.pt"),
    "rank folder gone": ("legacy", lambda f: shutil.rmtree(f / "mp_rank_00"), {"missing-rank"}, "mp_rank_00"),
    "last rank folder gone": ("legacy", lambda f: shutil.rmtree(f / "mp_rank_01"), {"topology-mismatch"}, "iter_0000004"),
    "rank of another iteration": ("legacy", lambda f: shutil.copyfile(f.parent / "iter_0000002" / "mp_rank_01" / "model_optim_rng.pt", f / "mp_rank_01" / "model_optim_rng.pt"), {"rank-divergence"}, "mp_rank_01"),
}  # fmt: skip


def test_rounding_between_ranks_is_no_drift(megatron_runs: Path, copied: Copy, verdict: Judge) -> None:
    run = copied(megatron_runs / "legacy")
    drifted(1e-7)(run / "iter_0000004")
    assert codes(verdict(run)) == set()


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_at_its_place(what: str, megatron_runs: Path, copied: Copy, verdict: Judge) -> None:
    name, damage, wanted, subject = DAMAGE[what]
    run = copied(megatron_runs / name)
    damage(run / "iter_0000004")
    found = verdict(run)
    assert found.resume in (Resume.UNSAFE, Resume.LOSSY), [f.message for f in found.findings]
    assert wanted & codes(found), [(f.code, f.message) for f in found.findings]
    assert any(subject in f.subject for f in found.findings if f.code in wanted)


def test_nemo_marks_and_names(megatron_runs: Path, copied: Copy, look: Look) -> None:
    run = copied(megatron_runs / "nemo")
    newest = max(p for p in run.iterdir() if p.is_dir())
    (run / f"{newest.name}-unfinished").touch()
    found = look(run).checkpoints[-1]
    assert found.resume is Resume.UNSAFE
    assert any(f.code == "incomplete-save" and f.subject.endswith("-unfinished") for f in found.findings)
    (run / f"{newest.name}-unfinished").unlink()
    newest.rename(newest.with_name(newest.name.replace("consumed_samples=32.0", "consumed_samples=8.0")))
    assert "data-position-mismatch" in codes(look(run).checkpoints[-1])


def test_a_nemo_folder_without_weights_is_no_checkpoint_to_overlook(
    megatron_runs: Path, copied: Copy, look: Look
) -> None:
    run = copied(megatron_runs / "nemo")
    shutil.rmtree(max(p for p in run.iterdir() if p.is_dir()) / "weights")
    report = look(run)
    assert [v.resume for v in report.checkpoints] == [Resume.EXACT, Resume.UNSAFE]
    assert "missing-file" in codes(report.checkpoints[-1])


def test_the_tracker_is_followed(megatron_runs: Path, copied: Copy, look: Look) -> None:
    run = copied(megatron_runs / "torch_dist")
    assert look(run).latest == str(run / "iter_0000004")
    (run / "latest_checkpointed_iteration.txt").write_text("30")
    assert "dangling-pointer" in {f.code for f in look(run).findings}
    (run / "latest_checkpointed_iteration.txt").write_text("")
    assert {f.code for f in look(run).findings if f.loud} & {"dangling-pointer", "stale-pointer"}


def test_the_plain_dcp_formats_need_no_completion_mark(tmp_path: Path, verdict: Judge) -> None:
    """Megatron-FSDP saves plain DCP into iter_N, with iteration and arguments as items, and no metadata.json."""
    import argparse

    import torch
    import torch.distributed.checkpoint as dcp

    weight = torch.arange(1.0, 7.0).reshape(2, 3)
    state = {
        "model": {"module.w": weight},
        "optimizer": {
            "state": {
                "module.w": {"step": torch.tensor(3.0), "exp_avg": weight * 0.1, "exp_avg_sq": weight * 0.01}
            },
            "param_groups": [{"lr": 0.1, "params": ["module.w"]}],
        },
        "opt_param_scheduler": {"max_lr": 0.1, "min_lr": 0.0, "num_steps": 24},
        "rng_state": {"(0, 0)": {"torch_rng_state": torch.get_rng_state()}},
        "iteration": 3,
        "args": argparse.Namespace(consumed_train_samples=24, global_batch_size=8),
    }
    dcp.save(state, checkpoint_id=tmp_path / "run" / "iter_0000003", no_dist=True)
    found = verdict(tmp_path / "run")
    assert (found.layout, found.step, found.resume, codes(found)) == ("megatron", 3, Resume.EXACT, set())


# --- masters ------------------------------------------------------------------------------------------


def test_masters_that_belong_to_other_weights_are_seen(
    megatron_runs: Path, copied: Copy, verdict: Judge
) -> None:
    """The fp32 masters of iteration 2 under the weights of iteration 4, each intact by itself."""
    run = copied(megatron_runs / "torch_dist")
    _masters_from(run / "iter_0000002", run / "iter_0000004")
    found = verdict(run)
    assert found.resume is Resume.UNSAFE, [(f.code, f.message) for f in found.findings]


def _masters_from(other: Path, folder: Path) -> None:
    def places(where: Path) -> dict[tuple[str, Any], Any]:
        metadata = pickle.loads((where / ".metadata").read_bytes())  # noqa: TID251 - our own file
        return {
            (k.fqn, tuple(k.offset or ())): v
            for k, v in metadata.storage_data.items()
            if "fp32_param" in k.fqn
        }

    for key, old in places(other).items():
        new = places(folder)[key]
        assert old.length == new.length
        raw = (other / old.relative_path).read_bytes()[old.offset : old.offset + old.length]
        with (folder / new.relative_path).open("r+b") as file:
            file.seek(new.offset)
            file.write(raw)


# --- integrity.json -----------------------------------------------------------------------------------


def sealed(run: Path) -> Path:
    folder = run / "iter_0000004"
    store = LocalStore(run)
    layout = layout_named("megatron")
    assert layout is not None
    (manifest,) = layout.claim(build_directory(store.list()).dirs[folder.name], lambda _: None)
    write_integrity(store, manifest)
    return folder


def test_integrity_json_is_verified_as_megatron_would(
    megatron_runs: Path, copied: Copy, verdict: Judge
) -> None:
    run = copied(megatron_runs / "torch_dist")
    folder = sealed(run)
    written = json.loads((folder / "integrity.json").read_text())
    assert written["algorithm"] == "sha256"
    assert set(written["files"]) == {p.name for p in folder.iterdir()} - {"integrity.json"}
    assert (verdict(run).resume, codes(verdict(run))) == (Resume.EXACT, set())
    (folder / "tokenizer.model").write_text("added later, in no list")
    assert verdict(run).resume is Resume.EXACT
    # A file that is whole in itself, and not the one that was saved.
    change_common(folder, lambda c: c.update(num_floating_point_operations_so_far=1))
    found = verdict(run)
    assert any(f.code == "digest-mismatch" and f.subject == "common.pt" for f in found.findings)
    drop(folder / "common.pt")
    assert any(f.code == "missing-file" and f.subject == "common.pt" for f in verdict(run).findings)


def test_a_broken_integrity_json_is_a_warning(megatron_runs: Path, copied: Copy, verdict: Judge) -> None:
    run = copied(megatron_runs / "torch_dist")
    folder = sealed(run)
    (folder / "integrity.json").write_text('{"algorithm": "md5", "files": {}}')
    assert (verdict(run).resume, codes(verdict(run))) == (Resume.EXACT, {"bad-header"})


# --- older forms --------------------------------------------------------------------------------------


def test_zarr_checkpoints_are_listed_and_said_to_be_unread(
    megatron_runs: Path, tmp_path: Path, verdict: Judge
) -> None:
    folder = tmp_path / "run" / "iter_0000002"
    for name in ("decoder.layers.weight", "optimizer.state.exp_avg.decoder.layers.weight"):
        (folder / name).mkdir(parents=True)
        (folder / name / ".zarray").write_text("{}")
        (folder / name / "0.0").write_bytes(b"1234")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    shutil.copyfile(megatron_runs / "torch_dist" / "iter_0000002" / "common.pt", folder / "common.pt")
    found = verdict(tmp_path / "run")
    assert (found.layout, found.step, codes(found)) == ("megatron", 2, set())
    assert "unverifiable" in codes(found, Severity.INFO)
    assert found.components["model"] is True


def test_the_legacy_distributed_optimizer_lies_beside_the_model(
    megatron_runs: Path, copied: Copy, verdict: Judge
) -> None:
    import torch

    run = copied(megatron_runs / "legacy")
    for rank in ("mp_rank_00", "mp_rank_01"):
        folder = run / "iter_0000004" / rank
        change_common(folder, lambda c: c["optimizer"]["optimizer"].pop("state"), "model_optim_rng.pt")
        flat = {key: torch.rand(24) for key in ("param", "exp_avg", "exp_avg_sq")}
        torch.save({0: {torch.float32: flat}}, folder / "distrib_optim.pt")
    found = verdict(run)
    assert (found.resume, codes(found)) == (Resume.EXACT, set())

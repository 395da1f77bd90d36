"""Saves as people make them with DCP's other writers and states: healthy ones are silent, interrupted ones are named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptguard.model import Resume, RunReport, Severity
from ckptguard.testing_damage import drop, truncate

pytestmark = pytest.mark.dcp
torch = pytest.importorskip("torch")
Look = Callable[..., RunReport]
Copy = Callable[[Path], Path]
FILES = {"embed.weight": 1, "norm.weight": 2, "norm.bias": 2}


def loud(report: RunReport) -> list[str]:
    findings = (*report.findings, *(f for v in report.checkpoints for f in v.findings))
    return [f"{f.code} {f.subject}: {f.message}" for f in findings if f.severity > Severity.INFO]


def codes(report: RunReport, name: str) -> set[str]:
    (verdict,) = [v for v in report.checkpoints if v.path.endswith(name)]
    return {f.code for f in verdict.findings if f.severity > Severity.INFO}


def run_of(folder: Path, save: Callable[[dict[str, Any], Path], None], *, sgd: bool = False) -> Path:
    """Three saves of a tiny training, on one process."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "norm": torch.nn.LayerNorm(4)})
    kind = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.1)
    from torch.distributed.checkpoint.state_dict import get_state_dict

    for step in (1, 2, 3):
        model["norm"](model["embed"](torch.arange(step + 2))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights, moments = get_state_dict(model, optimizer)
        state = {
            "model": weights, "optimizer": moments, "step": step, "class_weights": torch.linspace(1, 2, 5),
            "rng_state": torch.get_rng_state(),
        }  # fmt: skip
        save(state, folder / f"step-{step}")
    return folder


def plain(state: dict[str, Any], path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=path)


def in_files(state: dict[str, Any], path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    path.mkdir(parents=True)
    writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True, fqn_to_index_mapping=FILES)
    dcp.save(dict(state["model"]), storage_writer=writer)


def consolidated(state: dict[str, Any], path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    path.mkdir(parents=True)
    writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)
    dcp.save(dict(state["model"]), storage_writer=writer)


def test_each_rank_may_write_several_safetensors_files(tmp_path: Path, look: Look) -> None:
    report = look(run_of(tmp_path, in_files))
    assert loud(report) == []
    assert [v.resume for v in report.checkpoints] == [Resume.LOSSY] * 3


def test_a_file_that_no_rank_wrote_is_missing(tmp_path: Path, look: Look) -> None:
    run = run_of(tmp_path, in_files)
    drop(run / "step-3" / "shard-00001-model-00002-of-00002.safetensors")
    report = look(run)
    assert "missing-file" in codes(report, "step-3")
    assert report.checkpoints[-1].resume is Resume.UNSAFE


@pytest.mark.parametrize("files_too", [False, True])
def test_shards_that_were_not_put_together_are_a_save_that_did_not_finish(
    tmp_path: Path, look: Look, files_too: bool
) -> None:
    run = run_of(tmp_path, consolidated)
    assert loud(look(run)) == []
    drop(run / "step-3" / "model.safetensors.index.json")
    if files_too:
        drop(run / "step-3" / "model-00001-of-00001.safetensors")
    report = look(run)
    assert [v.step for v in report.checkpoints] == [1, 2, 3]
    assert codes(report, "step-3") == {"incomplete-save"}
    assert report.newest_safe is not None
    assert report.newest_safe.endswith("step-2")


def test_an_optimizer_without_state_is_there(tmp_path: Path, look: Look) -> None:
    report = look(run_of(tmp_path, plain, sgd=True))
    assert loud(report) == []
    assert {v.resume for v in report.checkpoints} == {Resume.EXACT}
    assert all(v.components["optimizer"] and v.components["rng"] for v in report.checkpoints)


def test_constants_beside_the_model_are_not_frozen_where_a_later_save_is_damaged(
    tmp_path: Path, look: Look
) -> None:
    run = run_of(tmp_path, plain)
    truncate(run / "step-3" / "__0_0.distcp", 0.5)
    report = look(run)
    assert [v.resume for v in report.checkpoints] == [Resume.EXACT, Resume.EXACT, Resume.UNSAFE]


def test_a_last_save_in_another_type_is_an_export(
    titan_run: Path, copied: Copy, look: Look, tmp_path: Path
) -> None:
    """torchtitan's export_dtype: what the run ends with holds the model alone, in bfloat16."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    run = copied(titan_run)
    last = run / "checkpoint" / "step-6"
    dcp_to_torch_save(last, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    shutil.rmtree(last)
    dcp.save({name: tensor.bfloat16() for name, tensor in whole.items()}, checkpoint_id=last)
    report = look(run)
    assert loud(report) == []
    assert report.resume_from is not None
    assert report.resume_from.endswith("step-4")


@pytest.mark.parametrize("lost", ["exp_avg_sq", "step", "all of it"])
def test_a_parameter_that_lost_its_optimizer_state(tmp_path: Path, look: Look, lost: str) -> None:
    def without(state: dict[str, Any], path: Path) -> None:
        moments = state["optimizer"]["state"]
        if state["step"] == 3 and lost == "all of it":
            del moments["norm.bias"]
        elif state["step"] == 3:
            del moments["norm.bias"][lost]
        plain(state, path)

    report = look(run_of(tmp_path, without))
    assert codes(report, "step-3") == {"missing-tensor"}
    assert [v.resume for v in report.checkpoints] == [Resume.EXACT, Resume.EXACT, Resume.UNSAFE]


def edited(run: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the last of torchtitan's full saves, the one before it at hand, and save it again with DCP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    trees = []
    for step in (2, 4):
        dcp_to_torch_save(run / "checkpoint" / f"step-{step}", run.parent / "whole.pt")
        trees.append(torch.load(run.parent / "whole.pt", weights_only=False))
    change(trees[1], trees[0])
    shutil.rmtree(run / "checkpoint" / "step-4")
    dcp.save(trees[1], checkpoint_id=run / "checkpoint" / "step-4")


def test_a_rank_that_stands_where_it_stood_before(titan_run: Path, copied: Copy, look: Look) -> None:
    run = copied(titan_run)
    edited(run, lambda now, then: None)
    assert codes(look(run), "step-4") == set()
    key = "dp_rank_1"
    edited(run, lambda now, then: now["dataloader"].update({key: then["dataloader"][key]}))
    assert codes(look(run), "step-4") == {"data-position-mismatch"}


def test_tokens_that_went_back(titan_run: Path, copied: Copy, look: Look) -> None:
    run = copied(titan_run)
    edited(run, lambda now, then: now["train_state"].update(ntokens_seen=1))
    assert codes(look(run), "step-4") == {"data-position-mismatch"}

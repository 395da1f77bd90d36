"""Which launches a checkpoint can follow, before the job waits for its nodes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptguard.errors import ConfigError, UsageError
from ckptguard.inspect import Options, preflight
from ckptguard.model import Evidence
from ckptguard.plan import LaunchPlan, family_of, plan_of, read_plan

Call = Callable[..., "subprocess.CompletedProcess[str]"]
CORPUS = Path(os.environ.get("CKPTGUARD_CORPUS", Path(__file__).parents[3] / "shared" / "corpus"))
needs_corpus = pytest.mark.skipif(not CORPUS.exists(), reason="needs the corpus")


def decide(run: Path, **plan: Any) -> tuple[str, list[tuple[str, str]]]:
    """(decision, [(effect, message)] of the launch findings on the newest)."""
    options = Options(depth=Evidence.STRUCTURE, grace=0.0, plan=plan_of(None, **plan))
    decision = preflight(str(run), options)
    assert decision.report is not None
    newest = decision.report.checkpoints[-1]
    found = [(str(f.effect), f.message) for f in newest.findings if f.code == "launch-mismatch"]
    return decision.decision, found


@needs_corpus
@pytest.mark.parametrize(
    ("case", "plan", "decision", "effect", "says"),
    [
        ("ds-zero1", {"world_size": 2}, "resume", None, ""),
        ("ds-zero1", {"world_size": 4}, "stop", "unsafe", "cut into parts for 2 data-parallel ranks, 4 are planned"),
        ("ds-zero3", {"world_size": 1}, "stop", "unsafe", "do not reshard"),
        ("ds-zero1", {"world_size": 4, "tp": 2}, "stop", "unsafe", "tied to tp 1, tp 2 is planned"),
        ("ds-zero1", {"optimizer": "adamw"}, "resume", None, ""),
        ("ds-zero1", {"optimizer": "lion"}, "stop", "unsafe", "the state is that of adam, lion is planned"),
        ("dcp-fsdp2", {"world_size": 2}, "resume", None, ""),
        ("dcp-fsdp2", {"world_size": 8}, "resume", "lossy", "states of 2 processes were saved, 8 are planned"),
        ("mcore", {"world_size": 8, "tp": 2}, "resume", None, ""),
        ("acc-two", {"world_size": 2}, "resume", None, ""),
        ("acc-two", {"world_size": 1}, "resume", "lossy", "the others are dropped"),
        ("hf-base", {"world_size": 1, "optimizer": "adamw_torch_fused"}, "resume", None, ""),
        ("hf-base", {"world_size": 8}, "resume", "lossy", "those of the others start afresh"),
        ("hf-base", {"precision": "fp16"}, "resume", "lossy", "no loss scale was saved"),
        ("hf-base", {"precision": "bf16"}, "resume", None, ""),
        ("hf-base", {"optimizer": "adafactor"}, "stop", "unsafe", "adafactor is planned"),
        ("torch-base", {"precision": "fp16", "world_size": 1}, "resume", None, ""),
    ],
)  # fmt: skip
def test_what_a_launch_would_lose(
    case: str, plan: dict[str, Any], decision: str, effect: str | None, says: str
) -> None:
    got, found = decide(CORPUS / case / "input", **plan)
    assert got == decision, found
    if effect is None:
        assert found == []
    else:
        assert any(e == effect and says in m for e, m in found), found


def test_generators_of_more_gpus_than_are_planned(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1,
        "rng": {"torch": torch.get_rng_state(), "cuda": [torch.get_rng_state() for _ in range(4)]},
    }  # fmt: skip
    torch.save(state, tmp_path / "step-1.pt")
    assert decide(tmp_path, world_size=4) == ("resume", [])
    decision, found = decide(tmp_path, world_size=2)
    assert decision == "resume"
    assert "generator states of 4 GPUs, 2 processes are planned" in found[0][1]


def test_the_command_names_the_loss_and_refuses_what_cannot_be(ckptguard: Call, tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, tmp_path / "step-1.pt"
    )
    lossy = ckptguard("preflight", tmp_path, "--precision", "fp16")
    assert lossy.returncode == 0
    assert "no loss scale was saved" in lossy.stderr
    refused = ckptguard("run", tmp_path, "--optimizer", "lion", "--", "true")
    assert refused.returncode == 78
    assert "launch-mismatch" in refused.stderr
    usage = ckptguard("preflight", tmp_path, "--world-size", "6", "--tp", "4")
    assert (usage.returncode, "cannot be cut into groups of 4" in usage.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "text", "plan"),
    [
        ("accelerate.yaml", "distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nmixed_precision: bf16\n", LaunchPlan(16, precision="bf16")),
        ("ds.json", json.dumps({"fp16": {"enabled": True}, "optimizer": {"type": "AdamW"}}), LaunchPlan(precision="fp16", optimizer="adam")),
        ("torchrun.yaml", "nnodes: 2\nnproc_per_node: 8\n", LaunchPlan(16)),
        ("megatron.yaml", "world_size: 64\ntensor_model_parallel_size: 8\npipeline_model_parallel_size: 2\nbf16: true\n", LaunchPlan(64, tp=8, pp=2, precision="bf16")),
        ("args.yaml", "optim: adamw_8bit\nfp16: false\nbf16: false\n", LaunchPlan(precision="fp32", optimizer="adam8bit")),
        ("titan.yaml", "parallelism:\n  tensor_parallel_degree: 4\n  pipeline_parallel_degree: 1\n", LaunchPlan(tp=4, pp=1)),
    ],
)  # fmt: skip
def test_launch_files(tmp_path: Path, name: str, text: str, plan: LaunchPlan) -> None:
    (tmp_path / name).write_text(text)
    assert plan_of(str(tmp_path / name)) == plan
    assert plan_of(str(tmp_path / name), world_size=128, precision="fp32").world_size == 128  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["", "a: [", "- 1\n", "learning_rate: 0.1\n"])
def test_a_file_that_says_nothing_of_a_launch(tmp_path: Path, text: str) -> None:
    (tmp_path / "launch.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"launch\.yaml"):
        read_plan(tmp_path / "launch.yaml")


def test_a_precision_that_is_none() -> None:
    with pytest.raises(UsageError, match="expected one of fp32, bf16, fp16"):
        plan_of(None, precision="int8")
    assert [family_of(n) for n in ("adamw_torch_fused", "FusedAdam", "paged_adamw_8bit", "Lion", "schedule_free_adamw")] == [
        "adam", "adam", "adam8bit", "lion", "schedulefree",
    ]  # fmt: skip

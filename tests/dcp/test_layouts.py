"""The layout contract for everything on top of DCP, on checkpoints that the frameworks themselves wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptguard.testing_layouts import LayoutContract


@pytest.mark.dcp
class TestDcp(LayoutContract):
    name = "dcp"
    count = 2

    @pytest.fixture(params=["fsdp2", "replicated", "threads", "file-an-item", "no-collectives", "background"])
    def sample(self, dcp_runs: Path, request: pytest.FixtureRequest) -> Path:
        return dcp_runs / request.param


@pytest.mark.dcp
class TestDcpWeights(LayoutContract):
    name = "dcp"
    count = 2
    holds = frozenset({"model"})

    @pytest.fixture(params=["weights", "safetensors", "huggingface"])
    def sample(self, dcp_runs: Path, request: pytest.FixtureRequest) -> Path:
        return dcp_runs / request.param


@pytest.mark.dcp
class TestTorchtitan(LayoutContract):
    name = "torchtitan"

    @pytest.fixture
    def sample(self, titan_run: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(titan_run / "checkpoint" / "step-2", tmp_path / "run" / "step-2")).parent


@pytest.mark.megatron
class TestMegatron(LayoutContract):
    name = "megatron"
    count = 2

    @pytest.fixture(params=["torch_dist", "new-core", "legacy"])
    def sample(self, megatron_runs: Path, request: pytest.FixtureRequest) -> Path:
        return megatron_runs / request.param


@pytest.mark.megatron
class TestMegatronBridge(LayoutContract):
    name = "megatron-bridge"
    count = 2

    @pytest.fixture
    def sample(self, megatron_runs: Path) -> Path:
        return megatron_runs / "bridge"


@pytest.mark.megatron
class TestNemo(LayoutContract):
    name = "nemo"
    count = 2

    @pytest.fixture
    def sample(self, megatron_runs: Path) -> Path:
        return megatron_runs / "nemo"

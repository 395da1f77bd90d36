"""Checkpoints that the real frameworks write once for all tests of this folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptguard.discover import find_checkpoints
from ckptguard.facts import Reader, Wanted
from ckptguard.inspect import Options, audit
from ckptguard.layouts._base import build_directory
from ckptguard.model import Evidence, FileFacts, RunReport, Verdict
from ckptguard.registry import layouts
from ckptguard.storage.local import LocalStore

HERE = Path(__file__).parent


def _write(script: str, out: Path) -> Path:
    done = subprocess.run(
        [sys.executable, str(HERE / script), str(out)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="session")
def dcp_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run for each way of using torch.distributed.checkpoint."""
    return _write("save_everything.py", tmp_path_factory.mktemp("dcp"))


@pytest.fixture(scope="session")
def titan_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write("save_titan.py", tmp_path_factory.mktemp("titan"))


@pytest.fixture(scope="session")
def megatron_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs torch_dist, new-core, bridge, nemo and legacy."""
    return _write("save_megatron.py", tmp_path_factory.mktemp("megatron"))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a run that a test may damage, with the times of the original."""

    def copy(run: Path) -> Path:
        return Path(shutil.copytree(run, tmp_path / run.name))

    return copy


@pytest.fixture
def look() -> Callable[..., RunReport]:
    """Audit a run that holds one training, without grace."""

    def at(run: Path, depth: Evidence = Evidence.CONTENT) -> RunReport:
        (report,) = audit(str(run), Options(depth=depth, grace=0.0))
        return report

    return at


@pytest.fixture
def verdict(look: Callable[..., RunReport]) -> Callable[..., Verdict]:
    """The verdict on the newest checkpoint of a run."""

    def at(run: Path, depth: Evidence = Evidence.CONTENT) -> Verdict:
        return look(run, depth).checkpoints[-1]

    return at


@pytest.fixture
def facts_of() -> Callable[[Path], dict[str, FileFacts]]:
    """The facts of every file of one checkpoint directory, its content read."""

    def read(folder: Path) -> dict[str, FileFacts]:
        store = LocalStore(folder.parent)
        (manifest,) = [
            m for m in find_checkpoints(build_directory(store.list()), layouts()) if m.path == folder.name
        ]
        with Reader(store) as reader:
            return reader.read(manifest, Wanted(Evidence.CONTENT, {}))

    return read

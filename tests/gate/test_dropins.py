"""Drop-ins for trainers: the Trainer's last checkpoint, and Composer's validation hook."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ckptguard.decisions import FOLDER
from ckptguard.errors import TargetNotFound
from ckptguard.integrations.composer import validate
from ckptguard.integrations.hf import NothingToResumeFrom, last_checkpoint

LOUD = (
    "SLURM",
    "TORCHELASTIC",
    "PMIX",
    "OMPI",
    "JOB_",
    "JOBSET",
    "CKPTGUARD",
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
)


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(LOUD)]:
        monkeypatch.delenv(name)


# --- the Trainer's last checkpoint --------------------------------------------------------------------


def test_names_what_preflight_would(broken_newest: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert last_checkpoint(broken_newest) == f"{broken_newest}/step-20.pt"
    assert "step-30.pt is unsafe" in caplog.text


def test_a_fresh_run_is_none_as_in_transformers(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    with pytest.raises(TargetNotFound):
        last_checkpoint(tmp_path / "none")
    assert last_checkpoint(tmp_path / "none", allow_missing=True) is None


def test_nothing_good_is_no_fresh_start(broken_newest: Path) -> None:
    for name in ("step-10.pt", "step-20.pt"):
        (broken_newest / name).unlink()
    with pytest.raises(NothingToResumeFrom, match=r"step-30\.pt is unsafe"):
        last_checkpoint(broken_newest)


def test_inside_of_run_it_takes_the_decision_of_run(healthy_run: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ckptguard.integrations.hf import last_checkpoint;"
        "Path(sys.argv[1], 'step-30.pt').write_bytes(b'a second look would see this');"
        "print(last_checkpoint(sys.argv[1]))"
    )
    command = [
        str(Path(sys.executable).with_name("ckptguard")),
        "run",
        str(healthy_run),
        "-q",
        "--",
        sys.executable,
        "-c",
        code,
        str(healthy_run),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"{healthy_run}/step-30.pt", done.stderr


RANK = """
import os, sys
import torch.distributed as dist
from ckptguard.errors import CkptguardError
from ckptguard.integrations.hf import last_checkpoint
if sys.argv[2] == "connected":
    dist.init_process_group("gloo")
try:
    print(last_checkpoint(sys.argv[1]))
except CkptguardError as error:
    print(type(error).__name__, error.message)
"""


def ranks(run: Path, how: str) -> list[str]:
    """What two processes of one job get."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(run), how],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [process.communicate(timeout=200)[0].strip() for process in started]


@pytest.mark.parametrize("how", ["connected", "apart"])
def test_all_ranks_get_one_answer(broken_newest: Path, how: str) -> None:
    assert ranks(broken_newest, how) == [f"{broken_newest}/step-20.pt"] * 2
    assert (broken_newest / FOLDER).exists() == (how == "apart")


def test_where_the_look_fails_it_fails_on_all_ranks(tmp_path: Path) -> None:
    first, second = ranks(tmp_path / "none", "connected")
    assert first.startswith("TargetNotFound")
    assert second.startswith("DecisionFailed rank 0 could not decide")


# --- Composer's hook ----------------------------------------------------------------------------------


def test_composer_asks_about_files_under_names_that_say_nothing(
    healthy_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    downloaded = tmp_path / "rank0_checkpoint"
    shutil.copy(healthy_run / "step-30.pt", downloaded)
    assert validate(downloaded) is True
    assert validate(str(downloaded), [(0, 10)]) is True
    data = bytearray(downloaded.read_bytes())
    data[len(data) // 2] ^= 0x10
    downloaded.write_bytes(data)
    assert validate(downloaded) is False
    assert f"{downloaded}: crc-mismatch" in caplog.text
    downloaded.write_bytes(b"not a checkpoint at all")
    assert validate(downloaded) is False
    assert os.listdir(tmp_path) == sorted(os.listdir(tmp_path))


def test_composer_folders(tmp_path: Path) -> None:
    corpus = Path(os.environ.get("CKPTGUARD_CORPUS", Path(__file__).parents[3] / "shared" / "corpus"))
    if not corpus.exists():
        pytest.skip("needs the corpus")
    good = sorted(p.parent for p in (corpus / "dcp-fsdp2" / "input").rglob(".metadata"))[-1]
    folder = Path(shutil.copytree(good, tmp_path / "step-20"))
    assert validate(folder) is True
    shard = next(folder.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert validate(folder) is False

"""What the tests of layouts share: runs written by the real frameworks, and what an audit says of them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptguard.inspect import Options, audit
from ckptguard.model import Finding, RunReport, Severity, Verdict

WRITERS = Path(__file__).parent / "writers"


@dataclass(frozen=True)
class Seen:
    """What an audit said. `loud` are all warnings and errors, the run's too."""

    reports: tuple[RunReport, ...]

    @property
    def verdicts(self) -> dict[str, Verdict]:
        return {v.path.rpartition("/")[2]: v for r in self.reports for v in r.checkpoints}

    @property
    def findings(self) -> list[Finding]:
        return [
            f for r in self.reports for f in (*r.findings, *(f for v in r.checkpoints for f in v.findings))
        ]

    @property
    def loud(self) -> list[str]:
        return [f"{f.code} {f.subject}: {f.message}" for f in self.findings if f.severity > Severity.INFO]

    def codes(self, name: str) -> set[str]:
        return {f.code for f in self.verdicts[name].findings if f.severity > Severity.INFO}

    def resume(self, name: str) -> str:
        return self.verdicts[name].resume.value


@pytest.fixture(scope="session")
def look() -> Callable[[Path], Seen]:
    """`look(folder)`: the whole audit, at full depth and with no grace period."""
    return lambda folder: Seen(audit(str(folder), Options(grace=0.0, jobs=2)))


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[Path, Callable[[Path], object]], Path]:
    """`damaged(run, how)`: a copy of a run, damaged; files keep their times."""

    def make(run: Path, how: Callable[[Path], object]) -> Path:
        copy = tmp_path / run.name
        shutil.copytree(run, copy, symlinks=True)
        how(copy)
        return copy

    return make


@pytest.fixture(scope="session")
def write_runs() -> Callable[..., Path]:
    """`write_runs(writer, out, names, ranks)`: run a writer script, one process a rank, and return where it wrote."""

    def write(writer: str, out: Path, names: Iterable[str], ranks: int = 1, timeout: float = 240) -> Path:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        # As torchrun would: nothing that an outer launcher left may tell the ranks anything else.
        env = {
            k: v
            for k, v in os.environ.items()
            if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        env |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        commands = [
            [sys.executable, str(WRITERS / writer), str(out), str(rank), port, *names]
            for rank in range(ranks)
        ]
        running = [
            subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for c in commands
        ]
        try:
            said = [p.communicate(timeout=timeout)[0] for p in running]
        finally:
            for process in running:
                process.kill()
        for process, text in zip(running, said):
            assert process.returncode == 0, text[-4000:]
        return out

    return write

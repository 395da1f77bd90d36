"""The README's commands, run as they stand there, on the run that `make demo` leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

README = Path(__file__).parents[2] / "README.md"


def commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.partition("  #")[0].rstrip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("ckptguard ")]


def test_it_has_the_three_integrations() -> None:
    verbs = {line.split()[1] for line in commands()}
    assert {"audit", "preflight", "run", "seal", "restore"} <= verbs
    assert "from ckptguard.record import Recorder" in README.read_text(encoding="utf-8")


@pytest.mark.timeout(280)
@pytest.mark.parametrize("line", commands())
def test_a_command_does_what_it_says(line: str, played: SimpleNamespace) -> None:
    assert played.document, played.done.stderr
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        line,
        shell=True,
        cwd=played.folder.parent,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((docs/[^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).is_file(), target

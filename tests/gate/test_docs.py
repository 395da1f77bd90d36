"""The commands of docs/gate.md do what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = Path(__file__).parents[2] / "docs" / "gate.md"
TRAIN = """
import sys
from pathlib import Path
Path(sys.argv[1], "started").write_text(" ".join(sys.argv[2:]))
print("training with", *sys.argv[2:])
"""
SRUN = """#!/bin/sh
# Two tasks of one step, as srun starts them.
export SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" & second=$!
wait $first && wait $second
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def place(healthy_run: Path, tmp_path: Path) -> Path:
    """A folder with runs/a, train.py, and `ckptguard` and `srun` on the path."""
    place = tmp_path / "place"
    (place / "bin").mkdir(parents=True)
    (place / "train.py").write_text(TRAIN)
    shutil.copytree(healthy_run, place / "runs" / "a")
    (place / "other-node" / "runs" / "a").mkdir(parents=True)
    (place / "bin" / "srun").write_text(SRUN)
    (place / "bin" / "srun").chmod(0o755)
    for name, target in (
        ("ckptguard", Path(sys.executable).with_name("ckptguard")),
        ("python", Path(sys.executable)),
    ):
        wrapper = place / "bin" / name
        wrapper.write_text(f'#!/bin/sh\nexec "{target}" "$@"\n')
        wrapper.chmod(0o755)
    return place


def sh(place: Path, script: str) -> subprocess.CompletedProcess[str]:
    known = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM", "CKPTGUARD", "WORLD_SIZE", "MASTER_"))
    }
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script],
        cwd=place,
        env={**known, "PATH": path},
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_shell_commands(place: Path) -> None:
    done = sh(place, "set -e\n" + "\n".join(blocks("bash")))
    assert done.returncode == 0, done.stderr
    assert "training with --resume runs/a/step-30.pt" in done.stdout
    assert (place / "runs/a/.ckptguard/verdicts/step-30.pt.json").exists()


def test_slurm_script(place: Path) -> None:
    (script,) = blocks("slurm")
    done = sh(place, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("training with --resume runs/a/step-30.pt") == 2
    assert len(list((place / "runs/a/.ckptguard/decisions").glob("slurm-9-0-0*.json"))) == 1


def command(place: Path, container: dict[str, Any]) -> list[str]:
    """A container's command with its mounts below our folder."""
    return [re.sub(r"(?<![\w.])/(runs|gate)\b", rf"{place}/\1", part) for part in container["command"]]


def run(place: Path, container: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    import shlex

    return sh(place, shlex.join(command(place, container)))


def test_kubernetes(place: Path) -> None:
    job, pod = (yaml.safe_load(text) for text in blocks("yaml"))
    (place / "gate").mkdir()
    container = job["spec"]["template"]["spec"]["containers"][0]
    done = run(place, container)
    assert f"training with --resume {place}/runs/a/step-30.pt" in done.stdout, done.stderr
    gate, train = pod["initContainers"][0], pod["containers"][0]
    assert run(place, gate).returncode == 0
    checkpoint = (place / "gate" / "checkpoint").read_text().strip()
    assert checkpoint == f"{place}/runs/a/step-30.pt"
    assert f"training with --resume {checkpoint}" in run(place, train).stdout
    shutil.rmtree(place / "runs" / "a")
    assert run(place, gate).returncode == 0
    assert (place / "gate" / "checkpoint").read_text() == ""
    (place / "runs" / "a").mkdir()
    assert run(place, train).stdout.strip() == "training with"
    (place / "runs" / "a" / "step-5.pt").write_bytes(b"broken")
    assert run(place, gate).returncode == 1
    assert run(place, container).returncode == 78
    rule = job["spec"]["podFailurePolicy"]["rules"][0]
    assert rule["onExitCodes"]["values"] == [78]


def test_python(place: Path) -> None:
    """The drop-in's lines, with a trainer that says what it was given."""
    (code,) = blocks("python")
    stand_in = "class trainer:\n    train = staticmethod(lambda resume_from_checkpoint: print(resume_from_checkpoint))\nclass training_args:\n    output_dir = 'runs/a'\n"
    done = sh(place, f"python - <<'END'\n{stand_in}{code}\nEND")
    assert done.stdout.strip() == "runs/a/step-30.pt", done.stderr

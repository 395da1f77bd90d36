"""What docs/restore.md shows is what works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "restore.md"


def test_the_first_recipe_and_its_commands(here, tmp_path, monkeypatch):
    text = DOCS.read_text()
    script = re.search(r"```python\n# train\.py\n(.*?)```", text, re.S)
    commands = re.search(r"```bash\n(python train\.py\n.*?)```", text, re.S)
    python = re.search(r"From Python:\n\n```python\n(.*?)```", text, re.S)
    assert script and commands and python
    (tmp_path / "train.py").write_text(script[1])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euc", commands[1]], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "bit for bit" in done.stdout
    assert (tmp_path / "restore.html").stat().st_size > 5000
    monkeypatch.chdir(tmp_path)
    exec(compile(python[1], "docs/restore.md", "exec"), {})

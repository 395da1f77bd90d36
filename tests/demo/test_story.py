"""The whole demo, as `make demo` plays it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.mark.timeout(280)
def test_the_demo_keeps_its_promises(played: SimpleNamespace) -> None:
    assert played.done.returncode == 0, played.done.stdout + played.done.stderr
    document = played.document
    assert (document["result"], document["bitwise"]) == ("continuous", True)
    assert document["caught"] == dict.fromkeys(
        ("flipped-bit", "truncated", "no-optimizer", "other-scheduler", "skipped-batch"), True
    )
    page = Path(document["page"]).read_text(encoding="utf-8")
    assert page.lstrip().startswith("<!") and "http://" not in page.replace("http://www.w3.org", "")


def test_it_refuses_a_folder_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.joinpath("mine.txt").write_text("mine")
    command = [sys.executable, "-m", "ckptguard", "demo", "--into", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["code"] == "usage"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]

"""The demo, played once for all tests that look at what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`.folder` that the demo wrote into, `.done` with its exit status, `.document` that it printed."""
    folder = tmp_path_factory.mktemp("demo") / "ckptguard-demo"
    command = [sys.executable, "-m", "ckptguard", "demo", "--into", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    document = json.loads(done.stdout) if done.stdout.startswith("{") else None
    return SimpleNamespace(folder=folder, done=done, document=document)

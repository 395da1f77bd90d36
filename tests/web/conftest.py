"""One real `ckptguard serve` for the tests that only look, and a real Chromium."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptguard.testing_service import ServeProcess, flip, until

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
EVIL = "step_<script>alert(1)</script>&\"'_30.pt"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, small_saves: dict[int, bytes]) -> Iterator[ServeProcess]:
    """A service that watched a run with a good, a damaged and an evilly named checkpoint, and its log."""
    folder = tmp_path_factory.mktemp("served")
    run = folder / "run"
    (run / ".ckptguard").mkdir(parents=True)
    for step in (10, 20):
        (run / f"step_{step}.pt").write_bytes(small_saves[step])
    # A file name may hold anything but a slash, and a finding repeats it.
    (run / EVIL.replace("/", "")).write_bytes(small_saves[30])
    flip(run / EVIL.replace("/", ""))
    rows = [
        {"attempt": 1, "rank": 0, "step": s, "loss": 3.0 - s / 50, "time": time.time() - 250 + 10 * s}
        for s in range(1, 26)
    ]
    (run / ".ckptguard" / "steps-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ServeProcess(
        folder / "state", {"runs": [{"path": str(run), "total_steps": 100, "gpus": 8}]}
    ) as process:
        until(
            lambda: process.sent() and process.get("/api/v1/runs")["items"][0]["step"] == 25,
            40,
            "the run is known",
        )
        until(
            lambda: process.get("/api/v1/runs")["items"][0]["checkpoints"].get("exact") == 2,
            30,
            "all are judged",
        )
        yield process


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("needs Debian's package chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder

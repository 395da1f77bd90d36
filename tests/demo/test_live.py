"""`ckptguard demo --serve`: a training watched live; the damage that its own words suggest is alerted within a minute."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from ckptguard.testing_service import until


def test_the_damage_that_it_suggests_is_seen_within_a_minute_and_both_end_when_asked(tmp_path: Path) -> None:
    folder, words = tmp_path / "demo", tmp_path / "words"
    with words.open("w") as out:
        demo = subprocess.Popen(
            [sys.executable, "-u", "-m", "ckptguard", "demo", "--into", str(folder), "--serve", "--port", "0"],
            stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "CKPTGUARD_STATE": str(tmp_path / "state")},
        )  # fmt: skip
    try:
        until(lambda: len(list(folder.glob("live/step-*.pt"))) >= 3, 150, "three checkpoints were saved")
        (command,) = re.findall(r"^  (printf .*)$", words.read_text(), re.MULTILINE)
        subprocess.run(["bash", "-c", command], check=True, capture_output=True)
        (alert, *_) = until(lambda: sent(folder), 60, "the alert came")
        assert (alert["severity"], alert["state"]) == ("error", "firing")
        assert alert["work_at_risk"]["newest_safe"], "the fall-back is named"
    finally:
        demo.terminate()
        assert demo.wait(40) == 0


def sent(folder: Path) -> list[dict]:
    path = folder / "alerts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

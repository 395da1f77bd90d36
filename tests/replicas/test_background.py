"""The recorder's background copy, with the real command and a real server behind it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptguard.record.replication import FOLDER, Replicator
from ckptguard.replica_look import list_tree
from ckptguard.storage import open_store

pytestmark = pytest.mark.s3


def test_a_save_is_copied_and_its_state_can_be_watched(make_run: Callable[[], Path], s3_bucket: str) -> None:
    run = make_run()
    # Recorders copy right after a save; this one is old, so that a broken file is no save in progress.
    (run / "checkpoint-20/optimizer.pt").write_bytes(b"no checkpoint")
    os.utime(run / "checkpoint-20/optimizer.pt", (time.time() - 3600,) * 2)
    replicator = Replicator(run, f"{s3_bucket}/runs/a")
    replicator.put("checkpoint-10")
    replicator.put("checkpoint-20")
    replicator.close()
    states = {n: json.loads((run / FOLDER / f"checkpoint-{n}.json").read_text()) for n in (10, 20)}
    assert (states[10]["state"], states[20]["state"]) == ("verified", "failed")
    assert "checkpoint-20 is unsafe, so it is not copied" in states[20]["message"]
    assert [m.path for m in list_tree(open_store(f"{s3_bucket}/runs/a")).checkpoints] == ["checkpoint-10"]

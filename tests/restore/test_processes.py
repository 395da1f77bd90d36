"""Child processes under limits: nothing of them is left, however they behave."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from ckptguard.errors import OutOfMemory, TimedOut
from ckptguard.restore.model import Limits
from ckptguard.restore.processes import run, tree_of

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"])
print(os.getpid(), flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_a_child_and_its_children_that_ignore_a_polite_stop_are_killed(tmp_path):
    with (tmp_path / "output").open("w+b") as output:
        with pytest.raises(TimedOut, match=r"not done after 1 s"):
            run([sys.executable, "-c", STUBBORN], Limits(timeout=1.0, grace=0.2), output=output)
        output.seek(0)
        pids = [int(line) for line in output.read().split()]
    assert len(pids) == 2 and gone(pids)


def test_memory_is_what_the_tree_holds_not_what_it_reserves(tmp_path):
    reserve = "import mmap; m = mmap.mmap(-1, 8 << 30); print('reserved')"
    hold = "b = bytearray(b'x' * (300 << 20)); import time; time.sleep(30)"
    with (tmp_path / "output").open("w+b") as output:
        ended = run([sys.executable, "-c", reserve], Limits(max_memory=100 << 20), output=output)
        assert ended.status == 0 and ended.peak < 100 << 20
        with pytest.raises(OutOfMemory, match=r"held \d{3} MB, more than the allowed 105 MB"):
            run([sys.executable, "-c", hold], Limits(max_memory=105_000_000, grace=0.2), output=output)


def test_it_is_stopped_when_asked(tmp_path):
    looks = iter([False, False, True])
    with (tmp_path / "output").open("w+b") as output:
        ended = run(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            Limits(grace=0.2),
            output=output,
            until=lambda: next(looks),
            look_every=0.05,
        )
    assert ended.status is None and ended.seconds < 10


def test_a_tree_holds_the_process_itself():
    import os

    assert os.getpid() in tree_of(os.getpid())

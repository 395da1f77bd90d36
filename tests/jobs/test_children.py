"""The reading process: what it answers, that it dies with its service, and that it can be ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckptguard.digest import BLOCK, block_digests
from ckptguard.errors import StoreDenied, TargetNotFound, TimedOut
from ckptguard.jobs.children import Cancelled, Child, ChildDied
from ckptguard.jobs.reread import accuse, scrub_file
from ckptguard.storage.local import LocalStore
from ckptguard.testing import FaultyStore
from ckptguard.testing_service import flip, until


@pytest.fixture
def child() -> Any:
    it = Child()
    yield it
    it.end()


def ask(child: Child, request: dict[str, Any], **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "timeout": 60.0,
        "progress": lambda name, count: None,
        "cancelled": lambda: False,
    }
    return child.ask(request, **(options | more))


def audit(target: Path, *deep: str) -> dict[str, Any]:
    return {
        "do": "audit", "target": str(target), "depth": "content", "grace": 0.0, "deep": list(deep), "known": {},
        "over": [], "still": [],
    }  # fmt: skip


def test_verdicts_come_one_by_one_with_the_digests_of_what_was_read(
    child: Child, tmp_path: Path, small_saves: dict[int, bytes]
) -> None:
    for step in (10, 20, 30):
        (tmp_path / f"step_{step}.pt").write_bytes(small_saves[step])
    flip(tmp_path / "step_20.pt")
    parts: list[dict[str, Any]] = []
    answer = ask(child, audit(tmp_path, "step_30.pt", "step_20.pt"), part=parts.append)
    told = [(p["path"], p["document"]["resume"], p["document"]["evidence"]) for p in parts]
    assert told == [
        ("step_30.pt", "exact", "content"), ("step_20.pt", "unsafe", "content"), ("step_10.pt", "exact", "structure"),
    ]  # fmt: skip
    data = small_saves[30]
    expected = list(block_digests(lambda start, length: data[start : start + length], len(data), BLOCK))
    assert parts[0]["files"][0]["blocks"] == expected
    assert any(t["name"] == "model.weight" and t["nonfinite"] == 0 for t in parts[0]["tensors"])
    assert answer["reports"][0]["latest"] == "step_30.pt"


def test_what_the_catalog_remembers_serves_as_a_seal(
    child: Child, tmp_path: Path, small_saves: dict[int, bytes]
) -> None:
    """A changed byte that no checksum of the file covers is found by the digests of first sight."""
    (tmp_path / "step_10.pt").write_bytes(small_saves[10])
    entry = LocalStore(tmp_path).stat("step_10.pt")
    file = {"size": entry.size, "modified": entry.modified, "etag": None, "digest": "x", "blocks": ["0" * 32]}
    seal = {
        "schema": 1,
        "checkpoint": "step_10.pt",
        "created": 1.0,
        "block_size": BLOCK,
        "files": {"step_10.pt": file},
    }
    parts: list[dict[str, Any]] = []
    ask(child, audit(tmp_path, "step_10.pt") | {"remembered": {"step_10.pt": seal}}, part=parts.append)
    assert [f["code"] for f in parts[0]["document"]["findings"]] == ["digest-mismatch"]


def test_errors_arrive_as_what_they_are_and_the_process_goes_on(child: Child, tmp_path: Path) -> None:
    with pytest.raises(TargetNotFound, match="no such"):
        ask(child, audit(tmp_path / "gone"))
    (tmp_path / "notes.txt").write_text("no checkpoint")
    assert ask(child, audit(tmp_path)) == {"reports": []}


def test_a_request_can_be_cancelled_and_runs_out_of_time(
    child: Child, tmp_path: Path, small_saves: dict[int, bytes]
) -> None:
    (tmp_path / "step_10.pt").write_bytes(small_saves[10])
    slow = audit(tmp_path, "step_10.pt") | {"max_rate": 1000}
    with pytest.raises(Cancelled):
        ask(child, slow, cancelled=lambda: True)
    with pytest.raises(TimedOut):
        ask(child, slow, timeout=1.0)
    assert ask(child, audit(tmp_path, "step_10.pt"))["reports"], "the next request begins afresh"


def test_a_process_that_is_killed_is_said_so(
    child: Child, tmp_path: Path, small_saves: dict[int, bytes]
) -> None:
    (tmp_path / "step_10.pt").write_bytes(small_saves[10])

    def kill() -> bool:
        assert child._process is not None
        os.kill(child._process.pid, signal.SIGKILL)
        return False

    with pytest.raises(ChildDied):
        ask(child, audit(tmp_path, "step_10.pt") | {"max_rate": 1000}, cancelled=kill)


def test_a_service_that_is_killed_leaves_no_reader_behind() -> None:
    script = (
        "import os, sys, time; from ckptguard.jobs.children import Child; c = Child(); p = c._started(); "
        "print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    reader = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not _alive(reader), 15, "the reader ends too")


def _alive(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


# --- reading again ------------------------------------------------------------------------------------


def remembered(store: Any, key: str) -> dict[str, Any]:
    entry = store.stat(key)
    blocks = block_digests(lambda start, length: store.read(key, start, length), entry.size, 4096)
    return {
        "id": 1, "key": key, "name": key, "size": entry.size, "modified": entry.modified, "etag": entry.etag,
        "block_size": 4096, "blocks": list(blocks), "first_seen": time.time(),
    }  # fmt: skip


def test_rot_a_replaced_file_and_a_gone_one_are_told_apart(
    tmp_path: Path, small_saves: dict[int, bytes]
) -> None:
    path = tmp_path / "a"
    path.write_bytes(small_saves[10])
    store = LocalStore(tmp_path)
    file = remembered(store, "a")

    def outcome() -> dict[str, Any]:
        return scrub_file(LocalStore(tmp_path), file, lambda name, count: None)

    assert outcome()["outcome"] == "good"
    flip(path)
    found = outcome()
    assert (found["outcome"], found["finding"]["code"]) == ("bad", "digest-mismatch")
    assert found["finding"]["message"].startswith("1 of ")
    path.write_bytes(small_saves[20])
    assert outcome()["outcome"] == "changed"
    path.unlink()
    assert outcome()["outcome"] == "gone"


def test_two_reads_that_differ_accuse_the_machine(tmp_path: Path, small_saves: dict[int, bytes]) -> None:
    (tmp_path / "a").write_bytes(small_saves[10])
    file = remembered(LocalStore(tmp_path), "a")
    wrong = [*file["blocks"][:-1], "0" * 32]
    assert accuse(file, tuple(wrong), tuple(file["blocks"])).code == "unstable-read"
    assert accuse(file, tuple(wrong), tuple(wrong)).code == "digest-mismatch"


def test_what_cannot_be_read_is_no_rot(tmp_path: Path, small_saves: dict[int, bytes]) -> None:
    (tmp_path / "a").write_bytes(small_saves[10])
    store = LocalStore(tmp_path)
    file = remembered(store, "a")
    denied = FaultyStore(store, deny={"a": StoreDenied("a: permission denied")})
    assert scrub_file(denied, file, lambda name, count: None)["finding"]["code"] == "unreadable"

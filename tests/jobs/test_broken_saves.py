"""A new checkpoint that is cut short, or cannot be read, is alerted within a minute; a save in progress never is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptguard.jobs import ended
from ckptguard.jobs.writers import any_written
from ckptguard.testing_proxy import Fault, FaultProxy
from ckptguard.testing_service import ServeProcess, until

STALL = 600.0


def row(step: int | None, changed: float, first: float | None = None) -> dict[str, Any]:
    return {"step": step, "changed_at": changed, "first_seen": changed if first is None else first}


def over(
    one: dict[str, Any], now: float, *others: dict[str, Any], usual: float | None = None,
    step: int | None = None, step_at: float | None = None,
) -> bool:  # fmt: skip
    run = {"usual": {"seconds": usual}, "step": step, "step_at": step_at}
    return ended.is_over(one, [one, *others], run, now, STALL)


def test_a_save_is_over_by_the_runs_rhythm_its_log_or_a_later_save_and_never_while_it_may_go_on() -> None:
    save = row(30, 1000.0)
    assert not over(save, 1500.0), "nothing tells that it is over"
    assert over(save, 1600.0), "but it has stalled by then"
    assert over(save, 1031.0, usual=5.0), "this run's saves take five seconds"
    assert not over(save, 1031.0, usual=90.0), "this run's saves take longer than it has lain still"
    assert not over(save, 1029.0, usual=5.0), "however short they are"
    assert over(save, 1031.0, row(40, 1010.0)), "a later save began after its last byte"
    assert not over(save, 1031.0, row(40, 1010.0, first=990.0)), (
        "two at once: a later one began before its last byte"
    )
    assert not over(save, 1031.0, row(20, 1010.0)), "an earlier one says nothing"
    assert over(save, 1031.0, step=31, step_at=1020.0), "the log is past it"
    assert not over(save, 1031.0, step=31, step_at=990.0), "it was past it before, as in an asynchronous save"
    assert not over(save, 1031.0, step=30, step_at=1020.0)
    assert not over(row(None, 1000.0), 1031.0, row(40, 1010.0), step=31, step_at=1020.0), (
        "whose step is not known"
    )
    assert not over(save, 10.0, usual=5.0), "a clock that jumped back concludes nothing"


def test_a_file_that_a_process_holds_open_for_writing_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "step 1.pt"
    path.write_bytes(b"x")
    with path.open("rb"):
        assert not any_written([path])
    with path.open("ab"):
        assert any_written([path])
    assert not any_written([path])


Serve = Callable[..., ServeProcess]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    started: list[ServeProcess] = []

    def begin(run: str | Path, environment: dict[str, str] | None = None) -> ServeProcess:
        process = ServeProcess(tmp_path / "state", {"runs": [{"path": str(run)}]}, environment=environment)
        started.append(process)
        process.start()
        return process

    yield begin
    for process in started:
        process.kill()


def fired(process: ServeProcess) -> list[str]:
    return [f"{a['state']} {a['code']} {Path(a['checkpoint'] or '').name}" for a in process.sent()]


def test_a_new_save_that_is_cut_short_is_alerted_within_a_minute_and_resolved_when_saved_again(
    serve: Serve, tmp_path: Path, small_saves: dict[int, bytes]
) -> None:
    """With the default patience of ten minutes: by a pointer, by a later save, and by nothing while somebody writes."""
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "step_10.pt").write_bytes(small_saves[10])
    process = serve(run_folder)
    until(lambda: process.get("/api/v1/checkpoints?resume=exact")["items"], 40, "the first is proven")
    began = time.monotonic()
    (run_folder / "step_20.pt").write_bytes(small_saves[20][:-700])
    with (run_folder / "step_30.pt").open("wb") as still_writing:
        still_writing.write(small_saves[30][:-700])
        still_writing.flush()
        # The newest one lies still as long, and the log is past both; but it is open.
        log = run_folder / ".ckptguard" / "steps-0.jsonl"
        log.parent.mkdir()
        log.write_text(json.dumps({"attempt": 1, "step": 31, "loss": 2.0, "time": time.time() + 2}) + "\n")
        until(lambda: "firing truncated step_20.pt" in fired(process), 60, "a cut save is told")
        print(f"a save that was cut short is alerted after {time.monotonic() - began:.0f} s")
        time.sleep(3)
        assert len(process.sent()) == 1, "and what is being written is not"
        still_writing.write(small_saves[30][-700:])
    (run_folder / "step_20.pt").write_bytes(small_saves[20])
    until(lambda: "resolved truncated step_20.pt" in fired(process), 40, "and its end")
    until(
        lambda: len(process.get("/api/v1/checkpoints?resume=exact")["items"]) == 3, 40, "all three are good"
    )
    assert len(process.sent()) == 2


@pytest.mark.s3
def test_a_new_save_that_the_store_does_not_let_us_read_is_alerted_within_a_minute_and_tried_again(
    serve: Serve, small_saves: dict[int, bytes], s3_server: Any, s3_bucket: str
) -> None:
    bucket = s3_bucket.removeprefix("s3://")
    with FaultProxy(s3_server.port) as proxy:
        denied = Fault("status", "step_20.pt", times=10**6, status=403, code="AccessDenied")
        proxy.faults.append(denied)
        for step in (10, 20):
            s3_server.client().put_object(Bucket=bucket, Key=f"run/step_{step}.pt", Body=small_saves[step])
        process = serve(f"{s3_bucket}/run", environment=s3_server.environment(endpoint=proxy.endpoint))
        until(lambda: "firing unreadable step_20.pt" in fired(process), 60, "it is told")
        (row,) = process.get("/api/v1/checkpoints?resume=unknown")["items"]
        assert "step_20.pt" in row["path"], "neither corrupt nor fine"
        denied.times = 0
        until(lambda: "resolved unreadable step_20.pt" in fired(process), 100, "it is tried again")
        assert len(process.sent()) == 2

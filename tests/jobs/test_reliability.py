"""`kill -9` at random moments under load, and a database that goes away: nothing is lost, nothing is said too often."""

from __future__ import annotations

import json
import random
import resource
import sqlite3
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ckptguard.testing_postgres import PostgresServer
from ckptguard.testing_service import ServeProcess, flip, until

RUNS = 6


def make_runs(folder: Path, saves: dict[int, bytes], count: int) -> list[Path]:
    """Runs of three checkpoints, the second of which is damaged."""
    runs = [folder / f"run-{number}" for number in range(count)]
    for run in runs:
        run.mkdir(parents=True)
        for step in (10, 20, 30):
            (run / f"step_{step}.pt").write_bytes(saves[step])
        flip(run / "step_20.pt")
    return runs


def config(runs: list[Path], **more: Any) -> dict[str, Any]:
    return {"runs": [{"path": str(run)} for run in runs], "follow_every": 2, **more}


def firing(process: ServeProcess) -> Counter[str]:
    return Counter(alert["key"] for alert in process.sent() if alert["state"] == "firing")


def keep_saving(runs: list[Path], saves: dict[int, bytes], stop: threading.Event) -> threading.Thread:
    """A training that goes on whatever happens to the service: new steps, damaged ones, rotated ones."""

    def save() -> None:
        draw = random.Random(4)
        while not stop.wait(0.3):
            run, step = draw.choice(runs), draw.choice((40, 50, 60))
            (run / f"step_{step}.pt").write_bytes(saves[step])

    thread = threading.Thread(target=save)
    thread.start()
    return thread


def consistent(database: Path) -> None:
    """What the database says of itself, and what must never be: two firing alerts of one key, a message without end."""
    with sqlite3.connect(database) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        twice = "SELECT key FROM alerts WHERE state = 'firing' GROUP BY key HAVING count(*) > 1"
        assert connection.execute(twice).fetchall() == []
        open_twice = (
            "SELECT 1 FROM findings WHERE gone_at IS NULL GROUP BY run_id, checkpoint_id, source, code, subject "
            "HAVING count(*) > 1"
        )
        assert connection.execute(open_twice).fetchall() == []


def survive(folder: Path, saves: dict[int, bytes], kills: int, seed: int) -> None:
    runs = make_runs(folder / "runs", saves, RUNS)
    process = ServeProcess(folder / "state", config(runs))
    draw = random.Random(seed)
    stop = threading.Event()
    training = keep_saving(runs, saves, stop)
    try:
        for _ in range(kills):
            process.start()
            time.sleep(draw.uniform(0.0, 2.5))
            process.kill()
            consistent(folder / "state" / "catalog.db")
        process.start()
        keys = {f"{run}:step_20.pt" for run in runs}
        until(lambda: keys <= set(firing(process)), 60, "every damaged checkpoint is alerted")
        stop.set()
        training.join()

        def quiet() -> bool:
            jobs = (
                process.get("/api/v1/jobs?state=queued")["items"]
                + process.get("/api/v1/jobs?state=running")["items"]
            )
            return not jobs

        until(quiet, 60, "all jobs ended")
        # A kill between a delivery and its mark sends that one message again, and no other.
        extra = sum(count - 1 for count in firing(process).values())
        assert extra <= kills, firing(process)
        found = process.get("/api/v1/findings?code=crc-mismatch")["items"]
        assert {Path(f["checkpoint"]).parent for f in found if f["checkpoint"].endswith("step_20.pt")} == set(
            runs
        )
        assert process.stop() == 0
        consistent(folder / "state" / "catalog.db")
    finally:
        stop.set()
        process.kill()


def test_kill_9_under_load_loses_nothing(tmp_path: Path, small_saves: dict[int, bytes]) -> None:
    survive(tmp_path, small_saves, kills=5, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_kill_9_fifty_times_under_load_loses_nothing(tmp_path: Path, small_saves: dict[int, bytes]) -> None:
    survive(tmp_path, small_saves, kills=50, seed=2)


@pytest.mark.postgres
def test_a_database_that_goes_away_is_said_and_survived(
    tmp_path: Path, small_saves: dict[int, bytes], postgres: PostgresServer
) -> None:
    (run,) = make_runs(tmp_path / "runs", small_saves, 1)
    process = ServeProcess(tmp_path / "state", config([run], db=postgres.database()))
    with process:
        until(lambda: firing(process), 40, "the damage is alerted, with PostgreSQL below")
        postgres.stop()
        try:
            until(lambda: process.get("/healthz")["status"] == "failing", 20, "health says it")
            assert process.get("/api/v1/runs")["error"]["code"] == "unreachable"
            (run / "step_40.pt").write_bytes(small_saves[40])
            flip(run / "step_40.pt")
        finally:
            postgres.start()
        until(
            lambda: f"{run}:step_40.pt" in firing(process), 60, "what happened meanwhile is found and alerted"
        )
        until(lambda: process.get("/healthz")["status"] == "ok", 40, "and the health is good again")
        assert set(firing(process).values()) == {1}


def test_a_full_disk_is_said_and_survived(tmp_path: Path, small_saves: dict[int, bytes]) -> None:
    """No file of the service may grow: what a full disk does to its catalog."""
    (run,) = make_runs(tmp_path / "runs", small_saves, 1)
    with ServeProcess(tmp_path / "state", config([run])) as process:
        until(lambda: firing(process), 40, "the damage is alerted")
        assert process.process is not None
        _, hard = resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (4096, hard))
        (run / "step_40.pt").write_bytes(small_saves[40])
        flip(run / "step_40.pt")
        until(lambda: process.get("/healthz")["status"] == "failing", 20, "health says it")
        resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        until(
            lambda: f"{run}:step_40.pt" in firing(process), 60, "what happened meanwhile is found and alerted"
        )
        until(lambda: process.get("/healthz")["status"] == "ok", 40, "and the health is good again")
        assert process.stop() == 0
    consistent(tmp_path / "state" / "catalog.db")


@pytest.mark.s3
def test_a_store_that_goes_away_is_said_and_accuses_no_checkpoint(
    tmp_path: Path, small_saves: dict[int, bytes], s3_bucket: str, s3_server: Any
) -> None:
    bucket = s3_bucket.removeprefix("s3://")
    s3_server.client().put_object(Bucket=bucket, Key="run/step_10.pt", Body=small_saves[10])
    with ServeProcess(tmp_path / "state", config([]) | {"runs": [{"path": f"{s3_bucket}/run"}]}) as process:

        def safe() -> str:
            items = process.get("/api/v1/runs")["items"]
            return (items[0]["resume_from"] or "") if items else ""

        until(safe, 60, "it is proven")
        s3_server.kill()
        try:
            until(lambda: process.get("/healthz")["status"] == "degraded", 90, "health says it")
            assert process.sent() == []
        finally:
            s3_server.start()
        s3_server.client().put_object(Bucket=bucket, Key="run/step_20.pt", Body=small_saves[20])
        until(lambda: safe().endswith("step_20.pt"), 90, "a new save is proven")
        until(lambda: process.get("/healthz")["status"] == "ok", 30, "and the health is good again")
        assert process.sent() == []


def test_two_hundred_runs_that_appear_at_once_are_all_seen(
    tmp_path: Path, small_saves: dict[int, bytes]
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    settings = {"discover": [f"{folder}/*"], "audit": {"depth": "structure"}, "follow_every": 5}
    for number in range(200):
        run = folder / f"run-{number:03}"
        run.mkdir()
        (run / "step_10.pt").write_bytes(small_saves[10])
    began = time.monotonic()
    with ServeProcess(tmp_path / "state", settings) as process:

        def listed() -> bool:
            items = process.get("/api/v1/runs?limit=200")["items"]
            return len(items) == 200 and all(item["looked_at"] for item in items)

        until(listed, 60, "all are listed")
        print(f"200 runs were listed {time.monotonic() - began:.1f} s after the start")
        until(lambda: process.get("/healthz")["status"] == "ok", 20, "the service is well")
        assert json.dumps(process.get("/api/v1/alerts"))

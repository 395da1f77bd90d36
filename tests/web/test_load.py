"""Pages with a full catalog are quick, and a hundred runs under watch stay cheap."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import insert

from ckptguard.catalog import open_catalog
from ckptguard.catalog.tables import alerts, checkpoints, events, files, findings, runs, saves
from ckptguard.testing_service import ServeProcess, until
from ckptguard.testing_service import saves as saves_of

RUNS, EACH, FINDINGS = 100, 100, 10


def fill(url: str, folder: Path) -> None:
    """A catalog of 100 runs with 100 checkpoints each, and 10 findings on each of these."""
    catalog = open_catalog(url)
    resumes = ("exact", "exact", "exact", "lossy", "unsafe")
    numbers = range(1, RUNS * EACH + 1)
    run_of = {n: (n - 1) // EACH + 1 for n in numbers}
    with catalog.write() as c:
        c.execute(insert(runs), [
            {"id": n, "target": str(folder / f"run-{n}"), "name": f"run-{n}", "first_seen": 1.0, "step": 1000, "watched": True}
            for n in range(1, RUNS + 1)
        ])  # fmt: skip
        c.execute(insert(checkpoints), [
            {
                "id": n, "run_id": run_of[n], "path": f"checkpoint-{n}", "step": n, "phase": "complete", "phase_since": 1.0,
                "first_seen": 1.0, "completed_at": 1.0 + n, "bytes": 10**9, "files": 9, "fingerprint": "f",
                "judged_fingerprint": "f", "resume": resumes[n % 5], "evidence": "content", "layout": "hf-trainer",
            }
            for n in numbers
        ])  # fmt: skip
        one = {
            "source": "audit",
            "severity": "warning",
            "effect": "none",
            "message": "m" * 80,
            "hint": "h" * 60,
        }
        c.execute(insert(findings), [
            {**one, "run_id": run_of[n], "checkpoint_id": n, "code": f"code-{k}", "subject": f"file-{k}", "first_seen": 1.0, "last_seen": 1.0}
            for n in numbers for k in range(FINDINGS)
        ])  # fmt: skip
        c.execute(insert(saves), [
            {"run_id": run_of[n], "checkpoint_id": n, "step": n, "started": float(n), "completed": n + 5.0, "seconds": 5.0,
             "bytes": 10**9, "watched": True} for n in numbers
        ])  # fmt: skip
        c.execute(insert(events), [
            {"run_id": run_of[n], "checkpoint_id": n, "at": float(n), "what": "complete", "detail": ""} for n in numbers
        ])  # fmt: skip
        c.execute(insert(files), [
            {"checkpoint_id": n, "name": f"file-{k}", "size": 10**8, "modified": 1.0, "block_size": 8 << 20, "blocks": ["d"],
             "first_seen": 1.0, "read_at": float(n)} for n in numbers for k in range(3)
        ])  # fmt: skip
        c.execute(insert(alerts), [
            {"key": f"k{n}", "run_id": run_of[n], "checkpoint_id": n, "code": "c", "severity": "error", "state": "firing",
             "title": "t", "message": "m", "hint": "h", "first_seen": 1.0, "said_at": 1e12} for n in numbers if n % 50 == 0
        ])  # fmt: skip
    catalog.close()


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_pages_are_quick_with_ten_thousand_checkpoints_and_a_hundred_thousand_findings(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path / 'full.db'}"
    if backend == "postgres":
        url = request.getfixturevalue("postgres").database()
    fill(url, tmp_path)
    (tmp_path / "empty").mkdir()
    config = {"db": url, "runs": [{"path": str(tmp_path / "empty")}], "watch": {"every": 60}, "scrub": None}
    with (
        ServeProcess(tmp_path / "state", config) as process,
        httpx.Client(base_url=process.url, timeout=30) as client,
    ):
        # The service itself watches one run only; for the pages all hundred count.
        catalog = open_catalog(url)
        until(lambda: client.get("/api/v1/runs").json()["items"], 20, "the service knows its run")
        time.sleep(1.5)
        with catalog.write() as c:
            c.execute(runs.update().values(watched=True))
        catalog.close()
        times: dict[str, float] = {}
        for path in (
            "/", "/runs/7", "/checkpoints/777", "/alerts", "/jobs", "/metrics", "/api/v1/runs",
            "/api/v1/checkpoints?limit=200", "/api/v1/checkpoints?resume=unsafe", "/api/v1/findings?severity=warning&limit=200",
            "/api/v1/findings?code=code-3&cursor=50000", "/api/v1/alerts",
        ):  # fmt: skip
            client.get(path)
            began = time.perf_counter()
            answer = client.get(path)
            times[path] = time.perf_counter() - began
            assert answer.status_code == 200, path
        print(json.dumps({path: f"{seconds * 1000:.0f} ms" for path, seconds in times.items()}, indent=1))
        assert max(times.values()) < 3.0, times


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_runs_with_a_hundred_checkpoints_are_watched_within_seconds(
    tmp_path: Path, small_saves: dict[int, bytes]
) -> None:
    folder = tmp_path / "runs"
    for number in range(RUNS):
        (folder / f"run-{number}").mkdir(parents=True)
        for step in range(EACH):
            (folder / f"run-{number}" / f"step_{step}.pt").hardlink_to(_one(tmp_path, small_saves))
    config: dict[str, Any] = {
        "discover": [f"{folder}/*"],
        "audit": {"depth": "listing"},
        "watch": {"every": 5, "settle": 1},
    }
    with ServeProcess(tmp_path / "state", config) as process:
        began = time.monotonic()
        until(lambda: _looked(process) == RUNS, 300, "all runs are listed")
        print(f"{RUNS} runs with {EACH} checkpoints each were listed in {time.monotonic() - began:.1f} s")
        delays: list[float] = []
        for cycle in range(20):
            run = folder / f"run-{cycle % RUNS}"
            (run / "step_120.pt").write_bytes(small_saves[120])
            began = time.monotonic()
            number = next(
                r["id"] for r in process.get("/api/v1/runs?limit=200")["items"] if r["target"] == str(run)
            )
            path = f"/api/v1/checkpoints?run={number}&limit=1"
            until(
                lambda path=path: "step_120" in process.get(path)["items"][0]["path"], 60, "the save is seen"
            )
            delays.append(time.monotonic() - began)
            (run / "step_120.pt").unlink()
        delays.sort()
        print(f"a save is seen after {delays[len(delays) // 2]:.1f} s (median), {delays[-1]:.1f} s (most)")
        assert delays[len(delays) // 2] < 10
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 << 20


ROUNDS, KEPT, LINES = 12, 5, 10
"""An hour in which each run saves every five minutes, keeps its last five, and logs every half minute."""


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_an_hour_of_a_hundred_runs_in_minutes_leaves_memory_flat(
    tmp_path: Path, small_saves: dict[int, bytes]
) -> None:
    """1200 saves are read whole, 1200 rotated away, 13,000 lines logged, damage alerted and healed; nothing piles up."""
    folder = tmp_path / "runs"
    names = [f"run-{number:03}" for number in range(RUNS)]
    for name in names:
        (folder / name / ".ckptguard").mkdir(parents=True)
    # Steps are real ones: every file is a checkpoint of its own that torch wrote.
    whole = saves_of(range(10, 10 * (ROUNDS + 2), 10))
    config: dict[str, Any] = {
        "discover": [f"{folder}/*"],
        "watch": {"every": 5, "settle": 0.5},
        "follow_every": 5,
        "retention": "10m",
    }
    with ServeProcess(tmp_path / "state", config) as process:
        assert process.process is not None
        memory: list[int] = []
        began = time.monotonic()
        for turn in range(1, ROUNDS + 2):
            for name in names:
                save(folder / name, whole, turn)
            _until_proven(process, turn)
            damaged = [folder / name / f"step_{10 * turn}.pt" for name in names[turn % 20 :: 20]]
            for path in damaged:
                path.write_bytes(flipped(whole[10 * turn]))
            _until_said(process, "firing", damaged)
            for path in damaged:
                path.write_bytes(whole[10 * turn])
            _until_said(process, "resolved", damaged)
            _until_proven(process, turn)
            memory.append(_resident(process.process.pid))
            print(f"{time.monotonic() - began:4.0f} s, {RUNS * turn:4} saves: {memory[-1] >> 10} MiB")
        warm, end = memory[1], memory[-1]
        print(
            f"an hour of {RUNS * ROUNDS} saves: memory grew by {(end - warm) / 1024:.1f} MiB ({end / warm - 1:+.1%})"
        )
        # Its own objects do not grow; the page caches of the database connections fill up, and then do not either.
        assert end < warm * 1.15
        said = [(a["key"], a["state"]) for a in process.sent()]
        assert len(said) == len(set(said)), "each was said once, and its end"
        # A run's first save has none before it: where that was damaged, no safe one was left.
        alone = [key for key, _ in said if key.endswith(":no-safe-checkpoint")]
        assert (len(alone), len(said) - len(alone)) == (2 * 5, 2 * 5 * (ROUNDS + 1))


def save(run: Path, whole: dict[int, bytes], turn: int) -> None:
    """Five minutes of a training: its log goes on, it saves, and rotates its oldest away."""
    now = time.time()
    rows = [
        {"attempt": 1, "rank": 0, "step": 10 * turn - LINES + n, "loss": 2.0, "time": now - LINES + n}
        for n in range(LINES)
    ]
    with (run / ".ckptguard" / "steps-0.jsonl").open("a") as log:
        log.write("".join(json.dumps(row) + "\n" for row in rows))
    (run / f"step_{10 * turn}.pt").write_bytes(whole[10 * turn])
    (run / f"step_{10 * (turn - KEPT)}.pt").unlink(missing_ok=True)


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def _until_proven(process: ServeProcess, turn: int) -> None:
    """Every run may be resumed from what it saved in this turn."""

    def done() -> bool:
        items = process.get("/api/v1/runs?limit=200")["items"]
        newest = [Path(run["resume_from"] or "").name for run in items]
        return newest == [f"step_{10 * turn}.pt"] * RUNS

    until(done, 900, f"turn {turn} is proven")


def _until_said(process: ServeProcess, state: str, paths: list[Path]) -> None:
    wanted = {str(path) for path in paths}
    until(
        lambda: wanted <= {a["checkpoint"] for a in process.sent() if a["state"] == state},
        300,
        f"{state} is said",
    )


def _resident(process: int) -> int:
    """The resident memory of a process, in KiB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def _one(folder: Path, saves: dict[int, bytes]) -> Path:
    path = folder / "one.pt"
    if not path.exists():
        path.write_bytes(saves[10])
    return path


def _looked(process: ServeProcess) -> int:
    return sum(1 for run in process.get("/api/v1/runs?limit=200")["items"] if run["looked_at"])

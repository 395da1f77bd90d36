"""The service in one process with real checkpoints: noticed, proven, alerted, healed, and what is gone stays known."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptguard.catalog import open_catalog, queries
from ckptguard.errors import UsageError
from ckptguard.jobs.service import Service
from ckptguard.settings import Settings, parse
from ckptguard.testing_service import flip, until

Start = Callable[..., "Running"]


class Running:
    """A service under test, with what the tests ask of it."""

    def __init__(self, folder: Path, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self.alerts = folder / "alerts.jsonl"
        self.catalog = open_catalog(f"sqlite:///{folder / 'catalog.db'}")
        self.service = Service(settings, self.catalog, None, clock)
        self.service.start()

    def rows(self, **filters: Any) -> dict[str, dict[str, Any]]:
        with self.catalog.read() as c:
            return {r["path"]: r for r in queries.checkpoints_page(c, gone=True, **filters).items}

    def resume(self, path: str) -> str | None:
        row = self.rows().get(path)
        judged = (
            row is not None and row["judged_fingerprint"] == row["fingerprint"] and row["phase"] == "complete"
        )
        return row["resume"] if row is not None and judged and row["evidence"] == "content" else None

    def run(self) -> dict[str, Any]:
        with self.catalog.read() as c:
            return queries.runs_page(c).items[0]

    def sent(self) -> list[tuple[str, str, str]]:
        if not self.alerts.exists():
            return []
        told = [json.loads(line) for line in self.alerts.read_text().splitlines()]
        return [(a["code"], a["state"], Path(a["checkpoint"] or "").name) for a in told]

    def jobs(self, name: str) -> list[dict[str, Any]]:
        with self.catalog.read() as c:
            return queries.jobs_page(c, name=name).items

    def now(self, name: str, run: int | None = None) -> dict[str, Any]:
        """Run a job and wait for its end."""
        number = self.service.queue(name, run)
        done: dict[str, Any] = until(
            lambda: next((j for j in self.jobs(name) if j["id"] == number and j["ended_at"]), None),
            30,
            f"{name} ends",
        )
        return done

    def stop(self) -> None:
        self.service.stop()
        self.catalog.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Running] = []

    def begin(runs: list[Path]) -> Running:
        text = json.dumps(
            {
                "runs": [{"path": str(run)} for run in runs],
                "watch": {"every": 0.3, "settle": 0.4, "stall_after": 2},
                "follow_every": 0.3,
                "alerts": [{"sink": f"file:{tmp_path / 'alerts.jsonl'}"}],
            }
        )
        running.append(Running(tmp_path, parse(text, "test", {})))
        return running[-1]

    yield begin
    for one in running:
        one.stop()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def write(run: Path, saves: dict[int, bytes], *steps: int) -> None:
    for step in steps:
        (run / f"step_{step}.pt").write_bytes(saves[step])


def test_a_save_is_proven_damaged_alerted_and_healed(
    start: Start, run_folder: Path, small_saves: dict[int, bytes]
) -> None:
    write(run_folder, small_saves, 10, 20, 30)
    running = start([run_folder])
    until(lambda: running.resume("step_30.pt") == "exact", 30, "the first checkpoints are proven")
    write(run_folder, small_saves, 40)
    until(lambda: running.resume("step_40.pt") == "exact", 15, "a new save is proven")
    assert running.run()["resume_from"] == "step_40.pt"

    damaged = bytearray(small_saves[40])
    damaged[len(damaged) // 2] ^= 1
    (run_folder / "step_40.pt").write_bytes(damaged)
    until(lambda: ("crc-mismatch", "firing", "step_40.pt") in running.sent(), 15, "the damage is alerted")
    assert running.run()["resume_from"] == "step_30.pt"
    assert (running.run()["work_at_risk"] or {})["newest_safe"] == str(run_folder / "step_30.pt")

    write(run_folder, small_saves, 40)
    until(lambda: ("crc-mismatch", "resolved", "step_40.pt") in running.sent(), 15, "the healing is told")
    time.sleep(1.5)
    assert len(running.sent()) == 2, "said once each, however often it is looked at"


def test_rot_that_changes_neither_size_nor_time_is_found_by_scrubbing_and_forgiven_when_healed(
    start: Start, run_folder: Path, small_saves: dict[int, bytes]
) -> None:
    write(run_folder, small_saves, 10, 20)
    running = start([run_folder])
    until(
        lambda: running.resume("step_10.pt") == "exact" and running.resume("step_20.pt"),
        30,
        "both are proven",
    )
    flip(run_folder / "step_10.pt")
    assert "1 bad" in running.now("scrub")["result"]
    until(lambda: ("digest-mismatch", "firing", "step_10.pt") in running.sent(), 10, "rot is alerted")
    assert running.rows()["step_10.pt"]["resume"] == "unsafe"
    flip(run_folder / "step_10.pt")
    assert "0 bad" in running.now("scrub")["result"]
    until(lambda: running.rows()["step_10.pt"]["resume"] == "exact", 15, "the healed one is proven again")
    until(lambda: ("digest-mismatch", "resolved", "step_10.pt") in running.sent(), 10, "and that is told")


def test_a_growing_save_is_writing_then_stalled_never_corrupt(
    start: Start, run_folder: Path, small_saves: dict[int, bytes]
) -> None:
    write(run_folder, small_saves, 10)
    running = start([run_folder])
    until(lambda: running.resume("step_10.pt") == "exact", 30, "the first one is proven")
    whole = small_saves[20]
    partial = run_folder / "step_20.pt.tmp"
    for end in range(1, 6):
        partial.write_bytes(whole[: len(whole) * end // 5])
        time.sleep(0.2)
    assert running.sent() == []
    until(
        lambda: ("stalled-save", "firing", "step_20.pt.tmp") in running.sent(), 15, "a stalled save is told"
    )
    partial.rename(run_folder / "step_20.pt")
    until(lambda: running.resume("step_20.pt") == "exact", 15, "the finished one is proven")
    until(
        lambda: ("stalled-save", "resolved", "step_20.pt.tmp") in running.sent(), 10, "and the stall is over"
    )
    assert {code for code, _, _ in running.sent()} == {"stalled-save"}


def test_a_directory_that_vanishes_is_an_ailment_and_not_a_loss_and_comes_back(
    start: Start, run_folder: Path, small_saves: dict[int, bytes]
) -> None:
    write(run_folder, small_saves, 10)
    running = start([run_folder])
    until(lambda: running.resume("step_10.pt") == "exact", 30, "it is proven")
    away = run_folder.with_name("away")
    run_folder.rename(away)
    health = running.service.context.health
    until(
        lambda: any("no such directory" in a.message for a in health.ailments(time.monotonic())),
        10,
        "health says it",
    )
    assert running.rows()["step_10.pt"]["gone_at"] is None
    assert running.sent() == []
    run_folder.mkdir()
    shutil.copytree(away, run_folder, dirs_exist_ok=True)
    write(run_folder, small_saves, 20)
    until(lambda: running.resume("step_20.pt") == "exact", 15, "a replaced directory is watched on")
    until(lambda: not health.ailments(time.monotonic()), 10, "and the health is good again")


def test_a_rotated_checkpoint_is_history_and_its_alerts_end(
    start: Start, run_folder: Path, small_saves: dict[int, bytes]
) -> None:
    write(run_folder, small_saves, 10, 20)
    damaged = small_saves[10][:-1000]
    (run_folder / "step_10.pt").write_bytes(damaged)
    running = start([run_folder])
    until(lambda: [s for s in running.sent() if s[1] == "firing"], 30, "a truncated one is told")
    (run_folder / "step_10.pt").unlink()
    until(
        lambda: [s for s in running.sent() if s[1] == "resolved"],
        15,
        "its alert ends when it is rotated away",
    )
    assert running.rows()["step_10.pt"]["phase"] == "rotated"


def test_the_log_tells_running_nan_and_a_lost_rank(
    start: Start, run_folder: Path, small_saves: dict[int, bytes]
) -> None:
    write(run_folder, small_saves, 10)
    logs = [run_folder / ".ckptguard" / f"steps-{rank}.jsonl" for rank in (0, 1)]
    logs[0].parent.mkdir()
    now = time.time()

    def log(rank: int, step: int, loss: float, at: float) -> None:
        with logs[rank].open("a") as file:
            file.write(
                json.dumps({"attempt": 1, "rank": rank, "step": step, "loss": loss, "time": at}) + "\n"
            )

    for step in range(1, 31):
        log(0, step, 2.0, now - 300 + 10 * step)
        if step <= 10:
            log(1, step, 2.0, now - 300 + 10 * step)
    running = start([run_folder])
    until(lambda: ("rank-lost", "firing", "") in running.sent(), 30, "the lost rank is told")
    until(
        lambda: running.run()["state"] == "running" and running.run()["step"] == 30, 10, "the run is running"
    )
    log(0, 31, float("nan"), now + 1)
    until(lambda: ("nonfinite-loss", "firing", "") in running.sent(), 10, "NaN is told")
    until(lambda: (running.run()["work_at_risk"] or {})["steps"] == 21, 20, "steps since the proven one")


def test_what_an_alert_says_to_do_can_be_done(
    start: Start, run_folder: Path, small_saves: dict[int, bytes]
) -> None:
    """Commands that exist, with the run put in."""
    from ckptguard.cli import build_app
    from ckptguard.jobs.assess import NEXT

    names = {command.name for command in build_app().registered_commands}
    for hint in NEXT.values():
        words = hint.partition("ckptguard ")[2].split()
        assert words[0] in names and words[1] == "RUN", hint
    write(run_folder, small_saves, 10)
    (run_folder / ".ckptguard").mkdir()
    row = {"attempt": 1, "step": 11, "loss": float("nan"), "time": time.time()}
    (run_folder / ".ckptguard" / "steps-0.jsonl").write_text(json.dumps(row) + "\n")
    running = start([run_folder])
    until(running.sent, 30, "NaN is told")
    alert = json.loads(running.alerts.read_text().splitlines()[0])
    assert alert["hint"].endswith(f"resume by ckptguard preflight {run_folder}")


def test_a_restart_goes_on_where_it_was(
    start: Start, run_folder: Path, small_saves: dict[int, bytes], tmp_path: Path
) -> None:
    write(run_folder, small_saves, 10, 20)
    first = start([run_folder])
    until(lambda: first.resume("step_10.pt") and first.resume("step_20.pt"), 30, "both are proven")
    first.service.stop()
    (run_folder / "step_20.pt").write_bytes(small_saves[20][:-500])
    second = start([run_folder])
    until(lambda: second.resume("step_20.pt") == "unsafe", 15, "what changed meanwhile is seen")
    first_verdict = second.rows()["step_10.pt"]["judged_at"]
    time.sleep(1.0)
    assert second.rows()["step_10.pt"]["judged_at"] == first_verdict, "what did not change is not read again"


def test_one_service_leads_on_a_catalog(
    start: Start, run_folder: Path, small_saves: dict[int, bytes]
) -> None:
    write(run_folder, small_saves, 10)
    start([run_folder])
    with pytest.raises(UsageError, match="another ckptguard serve works with this catalog"):
        start([run_folder])


def test_a_dead_sink_holds_back_no_other_and_gets_its_alerts_when_it_lives_again(
    run_folder: Path, small_saves: dict[int, bytes], tmp_path: Path
) -> None:
    write(run_folder, small_saves, 10, 20)
    flip(run_folder / "step_20.pt")
    late = tmp_path / "late"
    late.write_text("a file where a folder should be")
    sinks = [{"sink": f"file:{path}"} for path in (late / "alerts.jsonl", tmp_path / "alerts.jsonl")]
    text = json.dumps({"runs": [{"path": str(run_folder)}], "alerts": sinks})
    running = Running(tmp_path, parse(text, "test", {}))
    try:
        until(lambda: running.sent(), 30, "the living sink gets it")
        health = running.service.context.health
        until(
            lambda: any(a.part.startswith("sink") for a in health.ailments(time.monotonic())),
            10,
            "health says it",
        )
        late.unlink()
        until(lambda: (late / "alerts.jsonl").exists(), 20, "the other one gets it later")
        assert len((late / "alerts.jsonl").read_text().splitlines()) == len(running.sent())
    finally:
        running.stop()


def test_a_job_that_the_configuration_does_not_fill_does_nothing_and_says_so(
    start: Start, run_folder: Path, small_saves: dict[int, bytes]
) -> None:
    write(run_folder, small_saves, 10)
    running = start([run_folder])
    until(lambda: running.resume("step_10.pt"), 30, "it is proven")
    assert running.now("restore", running.run()["id"])["result"] == "this run has no recipe and no command"
    assert running.now("audit-again", running.run()["id"])["result"] == "1 of 1 checkpoints read again"


def test_a_job_that_fails_again_and_again_is_an_ailment_until_it_works(
    start: Start, run_folder: Path, small_saves: dict[int, bytes]
) -> None:
    write(run_folder, small_saves, 10)
    running = start([run_folder])
    until(lambda: running.resume("step_10.pt"), 30, "it is proven")
    health = running.service.context.health
    away = run_folder.with_name("away")
    run_folder.rename(away)
    assert running.now("audit", running.run()["id"])["state"] == "failed"
    (failed,) = [a for a in health.ailments(time.monotonic()) if a.part == f"job audit {run_folder}"]
    assert "no such" in failed.message
    away.rename(run_folder)
    assert running.now("audit", running.run()["id"])["state"] == "done"
    until(lambda: not health.ailments(time.monotonic()), 10, "and the health is good again")


def test_a_clock_that_jumps_raises_no_alarm_and_stops_nothing(
    run_folder: Path, small_saves: dict[int, bytes], tmp_path: Path
) -> None:
    offset = [0.0]
    text = json.dumps(
        {
            "runs": [{"path": str(run_folder)}],
            "watch": {"every": 0.3, "settle": 0.4},
            "alerts": [{"sink": f"file:{tmp_path / 'alerts.jsonl'}"}],
        }
    )
    write(run_folder, small_saves, 10, 20, 30)
    running = Running(tmp_path, parse(text, "test", {}), lambda: time.time() + offset[0])
    try:
        until(lambda: running.resume("step_30.pt") == "exact", 30, "the first ones are proven")
        for jump, step in ((-7200.0, 40), (86400.0, 50)):
            offset[0] += jump
            write(run_folder, small_saves, step)
            until(lambda step=step: running.resume(f"step_{step}.pt") == "exact", 20, "a new save is proven")
        assert running.sent() == []
        assert running.service.context.health.ailments(time.monotonic()) == []
    finally:
        running.stop()

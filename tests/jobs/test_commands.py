"""The commands of the service, as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckptguard.cli import build_app
from ckptguard.cli.serve import settings_of
from ckptguard.testing_service import ServeProcess, flip, until


def ckptguard(*words: str, state: Path) -> tuple[int, Any, str]:
    """(exit status, the document on stdout, what it said on stderr), of a command in this process."""
    done = CliRunner().invoke(
        build_app(), words, env={"CKPTGUARD_STATE": str(state), "CKPTGUARD_TOKEN": None}
    )
    document = json.loads(done.stdout) if done.stdout.lstrip().startswith("{") else done.stdout
    return done.exit_code, document, done.stderr


def safe(service: ServeProcess) -> str | None:
    """What the only run may be resumed from."""
    items = service.get("/api/v1/runs")["items"]
    return items[0]["resume_from"] if items else None


def test_history_and_jobs_ask_the_catalog_of_the_running_service(
    tmp_path: Path, small_saves: dict[int, bytes]
) -> None:
    run, state = tmp_path / "run", tmp_path / "state"
    run.mkdir()
    (run / "step_10.pt").write_bytes(small_saves[10])
    (run / "step_20.pt").write_bytes(small_saves[20])
    flip(run / "step_20.pt")
    with ServeProcess(state, {"runs": [{"path": str(run)}]}) as service:
        until(service.sent, 40, "the damage is alerted")
        until(lambda: safe(service), 20, "the good one is proven")
        status, known, _ = ckptguard("history", str(run), "--json", state=state)
        assert status == 0
        assert {Path(c["path"]).name: c["resume"] for c in known["checkpoints"]} == {
            "step_10.pt": "exact",
            "step_20.pt": "unsafe",
        }
        assert known["alerts"][0]["code"] == "crc-mismatch"
        assert (
            ckptguard("history", str(tmp_path / "other"), "--json", state=state)[1]["error"]["code"]
            == "not-found"
        )
        status, text, said = ckptguard("history", str(run), state=state)
        assert (status, "step_20.pt" in text, "resume from: " in said) == (0, True, True)

        status, queued, _ = ckptguard("jobs", "run", "audit-again", "--run", str(run), "--json", state=state)
        assert status == 0
        until(
            lambda: service.get(f"/api/v1/jobs/{queued['job']}")["state"] == "done", 20, "the service did it"
        )
        _, listed, _ = ckptguard("jobs", "list", "--run", str(run), "--json", state=state)
        assert {"id": queued["job"], "state": "done"}.items() <= listed["jobs"][0].items()
        assert ckptguard("jobs", "cancel", "9999", "--json", state=state)[0] == 2
        assert ckptguard("jobs", "run", "rm", "--json", state=state)[1]["error"]["code"] == "usage"
        assert ckptguard("jobs", "run", "scrub", "--run", str(run), "--json", state=state)[0] == 2
        assert service.stop() == 0, "stopped on request"


def test_a_service_that_cannot_start_says_why_with_status_2(tmp_path: Path) -> None:
    for words, code in (
        (["serve"], "usage"),
        (["serve", str(tmp_path), "--db", "mysql://x"], "config"),
        (["serve", str(tmp_path), "--alert", "nonsense"], "usage"),
        (["serve", "--config", str(tmp_path / "none.yaml")], "config"),
        (["serve", str(tmp_path), "--host", "0.0.0.0"], "config"),
    ):
        status, document, said = ckptguard(*words, "--json", state=tmp_path / "state")
        assert (status, document["error"]["code"]) == (2, code), said


def test_config_check_names_the_line_and_the_jobs(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("runs: [{path: /runs/a}]\nscrub: null\n")
    bad.write_text("runs:\n  - path: /runs/a\n    gpu: 8\n")
    status, document, _ = ckptguard("config", "check", str(good), "--json", state=tmp_path)
    assert (status, "scrub" in document["jobs"], "audit" in document["jobs"]) == (0, False, True)
    status, document, _ = ckptguard("config", "check", str(bad), "--json", state=tmp_path)
    assert status == 2
    assert f"{bad}:3: unknown key 'gpu'; known here: " in document["error"]["message"]


def test_config_check_finds_what_the_service_would_come_to_grief_by(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "runs: [{path: a, recipe: gone.py:recipe}]\ndb: mysql://u:hush@h/c\nserver: {host: 0.0.0.0}\n"
        "policy: {silence: {stale-ponter: moved@2999-01-01, rank-lost: known@2999-01-01}}\n"
        'prune: {options: ["--keep-lst 3"], apply: true}\n'
    )
    status, _, said = ckptguard("config", "check", str(config), state=tmp_path)
    assert status == 2
    for expected in (
        "policy.silence.stale-ponter: no such code",
        "server.host 0.0.0.0 needs a token",
        "db: no catalog can be kept in mysql; sqlite:///FILE or postgresql",
        "recipe gone.py: no such file",
        "prune.options: --keep-lst: no such option; known: --depth,",
        "prune.options: nothing says what to keep",
    ):
        assert expected in said
    assert "hush" not in said and "rank-lost" not in said


def test_the_runs_of_a_configuration_are_known_by_whole_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog outlives the folder that the service was started in."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "c.yaml"
    config.write_text("runs: [{path: runs/a/}, {path: s3://b/x/}]\ndiscover: ['more/*']\n")
    settings = settings_of(config, ["runs/a", "other/../runs/b"])
    assert [run.path for run in settings.runs] == [f"{tmp_path}/runs/a", "s3://b/x", f"{tmp_path}/runs/b"]
    assert settings.discover == (f"{tmp_path}/more/*",)


def test_alert_test_sends_a_firing_and_a_resolved_one_and_says_which_sink_does_not_work(
    tmp_path: Path,
) -> None:
    sink = tmp_path / "alerts.jsonl"
    status, document, _ = ckptguard(
        "alert", "test", f"file:{sink}", "file:/dev/full", "--json", state=tmp_path
    )
    assert status == 1
    assert [one["ok"] for one in document["sinks"]] == [True, False]
    assert [json.loads(line)["state"] for line in sink.read_text().splitlines()] == ["firing", "resolved"]


def test_the_default_works_with_nothing_but_a_run(tmp_path: Path, small_saves: dict[int, bytes]) -> None:
    """SQLite in the state directory, alerts on stderr, a token that only the user can read."""
    run, state = tmp_path / "run", tmp_path / "state"
    run.mkdir()
    (run / "step_10.pt").write_bytes(small_saves[10])
    flip(run / "step_10.pt")
    environment = {**os.environ, "CKPTGUARD_STATE": str(state)}
    environment.pop("CKPTGUARD_TOKEN", None)
    talk = (tmp_path / "stderr").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptguard", "serve", "run", "--port", "0"],
        cwd=tmp_path,
        env=environment,
        stderr=talk,
    )
    try:
        until(
            lambda: "ALERT ERROR crc-mismatch" in (tmp_path / "stderr").read_text(),
            60,
            "the alert is on stderr",
        )
        assert (state / "catalog.db").exists()
        assert (state / "token").stat().st_mode & 0o077 == 0
    finally:
        process.terminate()
        assert process.wait(20) == 0
        talk.close()


@pytest.mark.s3
def test_a_run_on_s3_is_watched_proven_and_alerted(
    tmp_path: Path, small_saves: dict[int, bytes], s3_bucket: str, s3_server: Any
) -> None:
    client, bucket = s3_server.client(), s3_bucket.removeprefix("s3://")
    client.put_object(Bucket=bucket, Key="run/step_10.pt", Body=small_saves[10])
    with ServeProcess(tmp_path / "state", {"runs": [{"path": f"{s3_bucket}/run"}]}) as service:
        until(lambda: safe(service), 60, "it is proven")
        damaged = bytearray(small_saves[20])
        damaged[len(damaged) // 2] ^= 1
        client.put_object(Bucket=bucket, Key="run/step_20.pt", Body=bytes(damaged))
        (alert,) = until(service.sent, 40, "the damage is alerted")
        assert (alert["code"], alert["checkpoint"]) == ("crc-mismatch", f"{s3_bucket}/run/step_20.pt")
        client.put_object(Bucket=bucket, Key="run/step_20.pt", Body=small_saves[20])
        until(lambda: [a for a in service.sent() if a["state"] == "resolved"], 40, "and its healing is told")

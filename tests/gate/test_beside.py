"""Looking beside a training: recorded verdicts, time limits, silences, several roots, and stepping back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from ckptguard.errors import StoreError, TimedOut, UsageError
from ckptguard.inspect import Options, audit, preflight
from ckptguard.model import Evidence, Resume
from ckptguard.silences import in_force, parse
from ckptguard.storage.local import LocalStore
from ckptguard.verdicts import record

Call = Callable[..., "subprocess.CompletedProcess[str]"]


def recorded(run: Path) -> None:
    for report in audit(str(run), Options(grace=0.0)):
        record(str(run), report.checkpoints, report.root, time.time())


def content_of(run: Path, **options: Any) -> dict[str, tuple[Resume, Evidence]]:
    reports = audit(str(run), Options(grace=0.0, **options))
    return {Path(v.path).name: (v.resume, v.evidence) for r in reports for v in r.checkpoints}


# --- recorded verdicts --------------------------------------------------------------------------------


def damage_unseen(path: Path) -> None:
    """Flip one bit of the weights, and put size and time back: what no listing shows."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_recorded_verdict_saves_reading(healthy_run: Path) -> None:
    recorded(healthy_run)
    read: list[int] = []
    preflight(str(healthy_run), Options(grace=0.0, max_age=60.0), lambda name, count: read.append(count))
    assert read == []
    decision = preflight(str(healthy_run), Options(grace=0.0, max_age=60.0))
    assert decision.resume_from == f"{healthy_run}/step-30.pt"
    assert decision.report is not None
    newest = decision.report.checkpoints[-1]
    assert newest.evidence is Evidence.CONTENT
    assert newest.coverage.bytes_proven > 0


def test_it_serves_only_the_files_it_was_made_of(healthy_run: Path) -> None:
    recorded(healthy_run)
    newest = healthy_run / "step-30.pt"
    os.utime(newest)
    damage_unseen(newest)
    assert content_of(healthy_run, max_age=60.0)["step-30.pt"][0] is Resume.UNSAFE


def test_it_serves_only_while_it_is_young_and_deep_enough(healthy_run: Path) -> None:
    recorded(healthy_run)
    damage_unseen(healthy_run / "step-30.pt")
    assert content_of(healthy_run, max_age=3600.0)["step-30.pt"][0] is Resume.EXACT
    later = Options(grace=0.0, max_age=3600.0, now=lambda: time.time() + 3700)
    assert audit(str(healthy_run), later)[0].checkpoints[-1].resume is Resume.UNSAFE
    for record_file in (healthy_run / ".ckptguard" / "verdicts").iterdir():
        body = json.loads(record_file.read_text())
        body["verdict"]["evidence"] = "structure"
        record_file.write_text(json.dumps(body))
    assert content_of(healthy_run, max_age=3600.0)["step-30.pt"][0] is Resume.UNSAFE


def test_what_structure_shows_counts_beside_a_recorded_verdict(healthy_run: Path) -> None:
    recorded(healthy_run)
    newest = healthy_run / "step-30.pt"
    before = newest.stat()
    newest.write_bytes(b"\\0" * before.st_size)
    os.utime(newest, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert content_of(healthy_run, max_age=60.0)["step-30.pt"][0] is Resume.UNSAFE


def test_a_damaged_record_is_no_record(healthy_run: Path) -> None:
    recorded(healthy_run)
    for text in ("", "{", '{"schema": 1}', '{"schema": 2}', "[]"):
        (healthy_run / ".ckptguard" / "verdicts" / "step-30.pt.json").write_text(text)
        assert content_of(healthy_run, max_age=60.0)["step-30.pt"] == (Resume.EXACT, Evidence.CONTENT)


def test_record_and_max_age_of_the_commands(ckptguard: Call, healthy_run: Path) -> None:
    assert ckptguard("audit", healthy_run, "--record", "-q").returncode == 0
    damage_unseen(healthy_run / "step-30.pt")
    done = ckptguard("preflight", healthy_run, "--max-age", "1h")
    assert done.stdout.strip() == f"{healthy_run}/step-30.pt"
    assert ckptguard("preflight", healthy_run).stdout.strip() == f"{healthy_run}/step-20.pt"
    assert ckptguard("preflight", healthy_run, "--max-age", "soon").returncode == 2


# --- time limits --------------------------------------------------------------------------------------


def test_what_was_not_read_in_time_is_unknown(healthy_run: Path) -> None:
    over = Options(grace=0.0, deadline=time.time() + 3600)
    assert {r for r, _ in content_of(healthy_run, deadline=over.deadline).values()} == {Resume.EXACT}
    clock = iter(range(10**6))
    late = Options(grace=0.0, deadline=9.0, now=lambda: float(next(clock)))
    verdicts = audit(str(healthy_run), late)[0].checkpoints
    assert Resume.UNKNOWN in {v.resume for v in verdicts}
    assert any("time limit" in f.message for v in verdicts for f in v.findings)


def test_no_older_one_is_chosen_because_time_ran_out(healthy_run: Path) -> None:
    recorded(healthy_run)
    (healthy_run / ".ckptguard" / "verdicts" / "step-30.pt.json").unlink()
    clock = iter(range(10**6))
    options = Options(grace=0.0, deadline=12.0, max_age=1e12, now=lambda: float(next(clock)))
    with pytest.raises((TimedOut, StoreError), match="time limit"):
        preflight(str(healthy_run), options)


def test_timeout_of_the_commands_fails_closed(ckptguard: Call, healthy_run: Path) -> None:
    done = ckptguard("preflight", healthy_run, "--timeout", "0", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "timeout"
    assert ckptguard("run", healthy_run, "--timeout", "0", "--", "true").returncode == 78


# --- silences -----------------------------------------------------------------------------------------

TOMORROW, YESTERDAY = date.today() + timedelta(days=2), date.today() - timedelta(days=2)


def test_silences_are_listed_and_change_no_resume(ckptguard: Call, broken_newest: Path) -> None:
    plain = json.loads(ckptguard("audit", broken_newest, "--json", "--grace", "0").stdout)
    code = plain["checkpoints"][-1]["findings"][0]["code"]
    done = ckptguard(
        "audit", broken_newest, "--json", "--grace", "0", "--silence", f"{code}=known since Monday@{TOMORROW}"
    )
    newest = json.loads(done.stdout)["checkpoints"][-1]
    assert done.returncode == 1
    assert newest["resume"] == "unsafe"
    silenced = next(f for f in newest["findings"] if f["code"] == code)
    assert silenced["severity"] == "info"
    assert f"known since Monday, until {TOMORROW}" in silenced["message"]
    expired = ckptguard(
        "audit", broken_newest, "--json", "--grace", "0", "--silence", f"{code}=old@{YESTERDAY}"
    )
    assert json.loads(expired.stdout)["checkpoints"][-1]["findings"][0]["severity"] == "error"
    assert f"the silence of {code} ended on {YESTERDAY}" in expired.stderr


def test_the_silences_of_the_services_configuration_count_too(
    ckptguard: Call, broken_newest: Path, tmp_path: Path
) -> None:
    plain = json.loads(ckptguard("audit", broken_newest, "--json", "--grace", "0").stdout)
    code = plain["checkpoints"][-1]["findings"][0]["code"]
    team = tmp_path / "team.yaml"
    silences = {code: f"known since Monday@{TOMORROW}", "rank-lost": f"said elsewhere@{TOMORROW}"}
    # JSON is YAML. The secrets of a service are not at hand where somebody audits.
    body = {"db": "postgresql://u:${NOT_SET_HERE}@h/c", "policy": {"silence": silences}}
    team.write_text(json.dumps(body))
    for command, status in (("audit", 1), ("preflight", 0)):
        done = ckptguard(command, broken_newest, "--json", "--grace", "0", "--config", team)
        newest = json.loads(done.stdout)["checkpoints"][-1]
        silenced = next(f for f in newest["findings"] if f["code"] == code)
        assert (done.returncode, newest["resume"], silenced["severity"]) == (status, "unsafe", "info")
    team.write_text("policy:\n  silense: {}\n")
    done = ckptguard("audit", broken_newest, "--config", team)
    assert done.returncode == 2
    assert "team.yaml:2: unknown key 'silense'" in done.stderr


def test_a_silenced_loss_is_still_passed_over(tmp_path: Path) -> None:
    import torch

    for step in (10, 20, 30):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        if step == 30:
            del state["optimizer"]
        torch.save(state, tmp_path / f"step-{step}.pt")
    assert preflight(str(tmp_path), Options(grace=0.0)).resume_from == f"{tmp_path}/step-20.pt"
    silenced = Options(grace=0.0, silenced={"missing-optimizer": "we know"})
    assert preflight(str(tmp_path), silenced).resume_from == f"{tmp_path}/step-20.pt"


@pytest.mark.parametrize(
    "text",
    [
        "stale-pointer",
        "stale-pointer=why",
        "stale-pointer=@2030-01-01",
        "no-such=x@2030-01-01",
        "debris=x@soon",
    ],
)
def test_what_is_no_silence(text: str) -> None:
    with pytest.raises(UsageError, match="--silence"):
        parse(text)


def test_the_last_day_counts() -> None:
    silence = parse("debris=tidied on Friday@2030-01-31")
    reasons, _ = in_force([silence], 1896134399.0)  # 2030-01-31T23:59:59Z
    assert reasons == {"debris": "tidied on Friday, until 2030-01-31"}
    assert in_force([silence], 1896134400.0) == ({}, (silence,))


# --- several roots ------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes(tmp_path: Path) -> tuple[Path, Path]:
    """A DeepSpeed run of two ranks whose nodes have no shared file system: each holds what its rank wrote."""
    import shutil

    corpus = Path(os.environ.get("CKPTGUARD_CORPUS", Path(__file__).parents[3] / "shared" / "corpus"))
    source = corpus / "ds-zero1" / "input"
    if not source.exists():
        pytest.skip("needs the corpus")
    one, two = tmp_path / "node1", tmp_path / "node2"
    shutil.copytree(source, one)
    for path in sorted(one.rglob("*zero_pp_rank_1_*")):
        there = two / path.relative_to(one)
        there.parent.mkdir(parents=True, exist_ok=True)
        path.rename(there)
    return one, two


def test_shards_on_two_disks_are_judged_together(ckptguard: Call, two_nodes: tuple[Path, Path]) -> None:
    one, two = two_nodes
    run = next(p.parent for p in one.rglob("latest"))
    other = two / run.relative_to(one)
    alone = ckptguard("audit", run, "--grace", "0", "--json")
    assert alone.returncode == 1
    assert "missing-rank" in alone.stdout
    both = ckptguard("audit", run, "--also", other, "--grace", "0", "--json")
    assert both.returncode == 0, both.stdout
    assert all(c["path"].startswith(str(run)) for c in json.loads(both.stdout)["checkpoints"])
    assert json.loads(both.stdout)["findings"] == []
    stale = next(run.glob("*/mp_rank_00_model_states.pt"))
    (other / stale.relative_to(run)).write_bytes(b"of another save")
    conflict = json.loads(ckptguard("audit", run, "--also", other, "--grace", "0", "--json").stdout)[
        "findings"
    ]
    assert [f["code"] for f in conflict] == ["replica-mismatch"]


def test_the_first_root_comes_first(tmp_path: Path) -> None:
    from ckptguard.storage.union import Union

    for name, text in (("a", b"one"), ("b", b"three")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same").write_bytes(text)
        (tmp_path / name / f"only-{name}").write_bytes(text)
    union = Union([LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")])
    assert {e.key: e.size for e in union.list()} == {"only-a": 3, "only-b": 5, "same": 3}
    assert union.read("same") == b"one"
    assert union.read("only-b", 1, 2) == b"hr"
    assert union.conflicts == {"same"}


# --- stepping back ------------------------------------------------------------------------------------

PRIORITY = """
import os, threading
from ckptguard.priority import io_class, step_back
step_back()
seen = []
thread = threading.Thread(target=lambda: seen.append(io_class()))
thread.start(); thread.join()
print(os.nice(0), *seen)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="I/O classes are Linux's")
def test_it_steps_back_with_all_its_threads() -> None:
    done = subprocess.run([sys.executable, "-c", PRIORITY], capture_output=True, text=True, check=True)
    nice, kind = done.stdout.split()
    assert int(nice) >= os.nice(0) + 10 or int(nice) == 19
    assert kind in ("3", "None")

"""`ckptguard run` end to end: what is started, with which checkpoint, and what its exit status is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., "subprocess.CompletedProcess[str]"]
ECHO = [sys.executable, "-c", "import sys; print(*sys.argv[1:])"]


def test_resumes_from_the_newest_good_one(ckptguard: Call, broken_newest: Path) -> None:
    done = ckptguard("run", broken_newest, "--", *ECHO, "{{--resume", "{checkpoint}}}", "-x")
    assert done.stdout.split() == ["--resume", f"{broken_newest}/step-20.pt", "-x"], done.stderr
    assert done.returncode == 0
    assert "step-30.pt is unsafe: truncated" in done.stderr or "step-30.pt is unsafe" in done.stderr


def test_fresh_run_drops_the_group(ckptguard: Call, tmp_path: Path) -> None:
    done = ckptguard("run", tmp_path, "--", *ECHO, "{{--resume", "{checkpoint}}}", "-x")
    assert (done.stdout.split(), done.returncode) == (["-x"], 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "{run}/none", "--", "true"], "no such file or directory"),
        (["run", "{run}", "--no-fresh", "--", "true"], "holds no checkpoint to resume from"),
        (["run", "{run}", "--wrong", "--", "true"], "No such option"),
        (["run", "{run}", "--depth", "deep", "--", "true"], "expected one of listing"),
        (["run", "{run}", "--", "true", "{{"], "never closed"),
        (["run", "{run}"], "COMMAND"),
    ],
)
def test_the_gates_own_no_is_78(ckptguard: Call, tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "run").mkdir()
    done = ckptguard(*[a.replace("{run}", str(tmp_path / "run")) for a in arguments])
    assert done.returncode == 78
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_good_refuses(ckptguard: Call, broken_newest: Path) -> None:
    for name in ("step-10.pt", "step-20.pt"):
        (broken_newest / name).unlink()
    done = ckptguard("run", broken_newest, "--", *ECHO, "{{--resume", "{checkpoint}}}")
    assert (done.returncode, done.stdout) == (78, "")
    assert "the command was not started" in done.stderr


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "exit 2"], 2),
        (["sh", "-c", "kill -9 $$"], 137),
        (["./no-such-program"], 127),
        (["/"], 126),
    ],
)
def test_exit_statuses_are_the_commands(
    ckptguard: Call, tmp_path: Path, command: list[str], status: int
) -> None:
    assert ckptguard("run", tmp_path, "--", *command).returncode == status


def test_json_is_one_document_on_stdout(ckptguard: Call, broken_newest: Path) -> None:
    done = ckptguard("run", broken_newest, "--json", "--", "echo", "hello")
    assert json.loads(done.stdout)["resume_from"] == f"{broken_newest}/step-20.pt"
    assert "hello" in done.stderr
    refused = ckptguard("run", broken_newest, "--json", "--wrong", "--", "true")
    assert json.loads(refused.stdout)["error"]["code"] == "usage"


def test_warns_where_the_command_would_choose_for_itself(ckptguard: Call, broken_newest: Path) -> None:
    done = ckptguard("run", broken_newest, "--", "true")
    assert f"it may take {broken_newest}/step-30.pt" in done.stderr


def test_the_training_does_not_inherit_a_low_priority(ckptguard: Call, healthy_run: Path) -> None:
    done = ckptguard(
        "run",
        healthy_run,
        "--max-rate",
        "1GB",
        "-q",
        "--",
        sys.executable,
        "-c",
        "import os; print(os.nice(0))",
    )
    assert int(done.stdout) == os.nice(0), done.stderr


WAITING = """
import signal, sys, time
def end(number, _):
    print("got", number, flush=True)
    if number == signal.SIGTERM:
        sys.exit(3)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, end)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def start(run: Path, *command: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    ckptguard = Path(sys.executable).with_name("ckptguard")
    return subprocess.Popen(
        [*prefix, str(ckptguard), "run", str(run), "--", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_signals_reach_the_command_once(tmp_path: Path) -> None:
    with start(tmp_path, sys.executable, "-c", WAITING) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            assert process.stdout.readline() == f"got {int(number)}\n"
        assert process.wait(30) == 3
        assert process.stdout.read() == ""


def test_a_command_without_handlers_dies_of_the_signal(tmp_path: Path) -> None:
    with start(tmp_path, "sh", "-c", "echo ready; exec sleep 60") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM


def test_a_launcher_killed_by_force_takes_the_command_with_it(tmp_path: Path) -> None:
    with start(tmp_path, "sh", "-c", "echo $$; exec sleep 60") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        process.wait(30)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and _alive(pid):
            time.sleep(0.05)
        assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


ORPHAN = "(sh -c 'sleep 0.2' & ) ; sleep 0.6; ps -o stat= --ppid 1 | grep -c Z; exit 5"


def test_as_the_first_process_of_a_container(tmp_path: Path) -> None:
    """Process 1 of a PID namespace: orphans are collected, SIGTERM arrives although nothing handles it there by default."""
    namespace = ("unshare", "--pid", "--fork", "--mount-proc")
    if subprocess.run([*namespace, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine does not let us make a PID namespace")
    with start(tmp_path, "sh", "-c", ORPHAN, prefix=namespace) as process:
        out, _ = process.communicate(timeout=60)
        assert (out.strip(), process.returncode) == ("0", 5)
    with start(tmp_path, "sh", "-c", "echo $$; exec sleep 60", prefix=namespace) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() != "1"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM

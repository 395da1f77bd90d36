"""One decision for all: who decides, what the others get, and what happens when that process fails or dies."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptguard.decisions import FOLDER, Agreement, DecisionFailed, Record
from ckptguard.errors import CkptguardError, StoreError, TargetNotFound
from ckptguard.storage.local import LocalStore

Call = Callable[..., "subprocess.CompletedProcess[str]"]
RESUME = Record("resume", "step-20.pt", 20)


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def agreement(tmp_path: Path, clock: Clock) -> Agreement:
    return Agreement(LocalStore(tmp_path), now=clock, sleep=clock.sleep)


def never() -> Record:
    raise AssertionError("a second process looked")


def test_one_of_many_looks_and_all_get_its_answer(tmp_path: Path) -> None:
    looks: list[int] = []
    gate = threading.Barrier(8)

    def process(number: int) -> Record:
        gate.wait()
        mine = Agreement(LocalStore(tmp_path), poll=0.01)
        return mine.take("job", lambda: looks.append(number) or RESUME)[0]  # type: ignore[func-returns-value]

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(process, range(8)))
    assert len(looks) == 1
    assert len(answers) == 1
    assert next(iter(answers)).checkpoint == "step-20.pt"


def test_a_decision_serves_for_its_time_only(agreement: Agreement, clock: Clock) -> None:
    assert agreement.take("job", lambda: RESUME)[1]
    clock.time += 899
    assert agreement.take("job", never)[0].checkpoint == "step-20.pt"
    clock.time += 2
    newer = Record("resume", "step-30.pt", 30)
    assert agreement.take("job", lambda: newer) == (agreement.take("job", never)[0], True)
    assert agreement.take("job", never)[0].checkpoint == "step-30.pt"


def test_a_refusal_serves_those_who_wait_but_not_the_next_start(agreement: Agreement, clock: Clock) -> None:
    assert agreement.take("job", lambda: Record("stop", reasons=("broken",)))[0].decision == "stop"
    assert agreement.take("job", never)[0].reasons == ("broken",)
    clock.time += 61
    assert agreement.take("job", lambda: RESUME)[0].decision == "resume"


def test_when_the_look_fails_it_fails_for_all(agreement: Agreement) -> None:
    def unmounted() -> Record:
        raise TargetNotFound("runs/a: no such directory", "is the volume mounted?")

    with pytest.raises(TargetNotFound):
        agreement.take("job", unmounted)
    with pytest.raises(DecisionFailed, match=r"could not decide: runs/a: no such directory") as caught:
        agreement.take("job", never)
    assert (caught.value.error_code, caught.value.exit_code) == ("not-found", 2)

    def crash() -> Record:
        raise ZeroDivisionError("unforeseen")

    with pytest.raises(ZeroDivisionError):
        agreement.take("other", crash)
    with pytest.raises(DecisionFailed, match="ZeroDivisionError"):
        agreement.take("other", never)


def test_a_dead_process_does_not_hold_the_others(agreement: Agreement, tmp_path: Path, clock: Clock) -> None:
    claim = tmp_path / FOLDER / "job.claim"
    claim.parent.mkdir(parents=True)
    claim.write_text(json.dumps({"by": "node7 (pid 1)", "beat": 3}))
    record, mine = agreement.take("job", lambda: RESUME)
    assert mine
    assert record.checkpoint == "step-20.pt"
    assert clock.time > 1000 + 120
    dead = json.loads((tmp_path / FOLDER / "job.json").read_text())
    assert "node7 (pid 1) was deciding for all and gave no sign of life" in dead["error"][1]


def test_a_process_taken_for_dead_takes_the_others_decision(agreement: Agreement, clock: Clock) -> None:
    """It slept through the others' patience: what it found is not used, not even by itself."""
    others = Record("resume", "step-10.pt", 10)

    def slow() -> Record:
        agreement._wait(f"{FOLDER}/job")
        agreement.take("job", lambda: others)
        return RESUME

    record, mine = agreement.take("job", slow)
    assert (record.checkpoint, mine) == ("step-10.pt", False)


def test_what_is_no_decision_is_an_error(agreement: Agreement, tmp_path: Path) -> None:
    place = tmp_path / FOLDER / "job.json"
    place.parent.mkdir(parents=True)
    good = {
        "schema": 1, "decision": "resume", "checkpoint": "step-20.pt", "step": 20, "reasons": [], "error": None,
        "made": 0, "expires": 2e9, "by": "node1",
    }  # fmt: skip
    for text in (
        "",
        "[]",
        '{"schema": 2}',
        json.dumps({**good, "checkpoint": None}),
        json.dumps({**good, "decision": "go"}),
        json.dumps({**good, "checkpoint": "../b/step-20.pt"}),
    ):
        place.write_text(text)
        with pytest.raises(StoreError, match="not a decision"):
            agreement.take("job", never)
    place.write_text(json.dumps(good))
    assert agreement.take("job", never)[0].checkpoint == "step-20.pt"


def test_tasks_of_one_srun_take_one_decision(ckptguard: Call, broken_newest: Path) -> None:
    task = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    command = ("run", broken_newest, "--", "sh", "-c", "echo {checkpoint} $CKPTGUARD_DECISION_ID")
    first = ckptguard(*command, environment=task)
    assert first.stdout.split() == [f"{broken_newest}/step-20.pt", "slurm-77-0-0"], first.stderr
    (broken_newest / "step-20.pt").write_bytes(b"a second look would see this")
    second = ckptguard(*command, environment=task)
    assert second.stdout == first.stdout
    third = ckptguard(*command, environment={**task, "SLURM_RESTART_COUNT": "1"})
    assert third.stdout.split()[0] == f"{broken_newest}/step-10.pt"


def test_a_node_that_does_not_see_the_checkpoint_says_so(ckptguard: Call, healthy_run: Path) -> None:
    command = ("run", healthy_run, "--decision-id", "start-1", "--", "echo", "{checkpoint}")
    assert ckptguard(*command).stdout.strip() == f"{healthy_run}/step-30.pt"
    (healthy_run / "step-30.pt").unlink()
    done = ckptguard(*command)
    assert done.returncode == 78
    assert "is not visible here" in done.stderr


def test_a_run_named_by_its_checkpoint_is_refused_where_nodes_must_agree(
    ckptguard: Call, healthy_run: Path
) -> None:
    inside = healthy_run / "hf" / "checkpoint-5"
    inside.mkdir(parents=True)
    (inside / "trainer_state.json").write_text('{"global_step": 5}')
    done = ckptguard("run", inside, "--decision-id", "x", "--", "true")
    assert done.returncode == 78
    assert "name the run that holds it" in done.stderr
    assert not (inside / ".ckptguard").exists()


class ReadOnly(LocalStore):
    """A file system that is mounted read-only, whoever asks (root may write through closed folders)."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None):  # type: ignore[no-untyped-def]
        raise StoreError(f"{key}: Read-only file system")


def test_a_read_only_run_says_what_to_do(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(CkptguardError, match="cannot agree on one checkpoint") as caught:
        Agreement(ReadOnly(tmp_path), now=clock, sleep=clock.sleep).take("job", never)
    assert "ckptguard preflight RUN" in caught.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_one_process_needs_no_writable_run(ckptguard: Call, healthy_run: Path) -> None:
    healthy_run.chmod(0o555)
    done = ckptguard("run", healthy_run, "--", "echo", "{checkpoint}")
    healthy_run.chmod(0o755)
    assert done.stdout.strip() == f"{healthy_run}/step-30.pt"


@pytest.mark.s3
def test_agreement_on_s3(s3_bucket: str) -> None:
    from ckptguard.storage.opening import open_store

    looks: list[int] = []

    def process(number: int) -> Record:
        mine = Agreement(open_store(f"{s3_bucket}/run"), poll=0.05)  # type: ignore[arg-type]
        return mine.take("job", lambda: looks.append(number) or RESUME)[0]  # type: ignore[func-returns-value]

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(process, range(3)))) == 1
    assert len(looks) == 1

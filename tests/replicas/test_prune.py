"""What may be deleted, decided without any store, and then really deleted on disk and on S3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.errors import UsageError
from ckptguard.model import Coverage, Evidence, Health, LogRow, Resume, Verdict
from ckptguard.prune import Decided, Policy, Protection, plan_prune

NOW = 1_000_000.0
MakeRun = Callable[[], Path]


def verdict(step: int, resume: str = "exact", age: float = 9999) -> Verdict:
    return Verdict(
        f"r/c-{step}", "hf-trainer", step, Resume(resume), Evidence.CONTENT, 1, 100, {}, (), Coverage(), Health(), (),
        modified=NOW - age,
    )  # fmt: skip


def kept(decided: tuple[Decided, ...]) -> list[int | None]:
    return [d.step for d in decided if not d.delete]


def plan(
    verdicts: list[Verdict], policy: Policy, protection: Protection | None = None, log: Any = ()
) -> list[int | None]:
    return kept(plan_prune(verdicts, policy, protection or Protection(), log, NOW, 900))


def test_each_rule() -> None:
    run = [verdict(n) for n in (100, 200, 300, 400, 500)]
    log = [LogRow(n, extra={"eval_loss": loss}) for n, loss in ((100, 3.0), (200, 1.0), (300, 2.0))]
    assert plan(run, Policy(last=2)) == [400, 500]
    assert plan(run, Policy(every=200)) == [200, 400, 500]
    assert plan(run, Policy(best="eval_loss"), log=log) == [200, 500]
    assert plan(run, Policy(best="eval_loss:max", last=1), log=log) == [100, 500]
    with pytest.raises(UsageError, match="no such value"):
        plan(run, Policy(best="eval_acc"), log=log)
    for wrong in (dict[str, int](), {"last": 0}, {"every": 0}):
        with pytest.raises(UsageError):
            Policy(**wrong)  # type: ignore[arg-type]


def test_only_safe_ones_count_and_only_safe_ones_go() -> None:
    run = [
        verdict(100),
        verdict(200),
        verdict(300, "unsafe"),
        verdict(400, "unknown"),
        verdict(500, "writing", 5),
    ]
    assert plan(run, Policy(last=1)) == [200, 300, 400, 500]
    assert plan([verdict(1, "unsafe")], Policy(last=1)) == [1]


def test_what_is_named_young_or_not_on_the_replica_stays() -> None:
    run = [verdict(100), verdict(200), verdict(300, age=10), verdict(400)]
    assert plan(run, Policy(last=1), Protection({"r/c-100": "latest names it"})) == [100, 300, 400]
    assert plan(run, Policy(last=1), Protection(replica="s3://b", proven=["r/c-200"])) == [100, 300, 400]


@given(
    st.lists(st.sampled_from(["exact", "lossy", "unsafe", "unknown", "writing"]), max_size=8),
    st.integers(1, 3),
)
def test_the_newest_safe_one_never_goes(states: list[str], last: int) -> None:
    run = [verdict(n * 10, state) for n, state in enumerate(states, 1)]
    decided = plan_prune(run, Policy(last=last), Protection(), (), NOW, 900)
    safe = [v for v in run if v.resume.safe]
    assert all(d.resume.safe for d in decided if d.delete)
    left = [d for d in decided if not d.delete and d.resume.safe]
    assert len(left) >= min(last, len(safe))
    if safe:
        assert safe[-1].path in {d.path for d in left}


def names(run: Path) -> list[str]:
    return sorted(p.name for p in run.iterdir() if not p.name.startswith("."))


def test_on_disk(make_run: MakeRun, ckptguard: Callable[..., Any]) -> None:
    run = make_run()
    unfinished = run / "tmp-checkpoint-5"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    for path in (unfinished, unfinished / "model.safetensors"):
        os.utime(path, (time.time() - 9 * 86400,) * 2)
    done = ckptguard("prune", run, "--keep-last", 1, "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 0 and not document["applied"]
    assert [d["step"] for d in document["delete"]] == [10, 20]
    assert names(run) == ["checkpoint-10", "checkpoint-20", "checkpoint-30", "tmp-checkpoint-5"]

    (run / "latest").write_text("checkpoint-20")
    done = ckptguard("prune", run, "--keep-last", 1, "--apply")
    assert done.exit_code == 0, done.output
    assert names(run) == ["checkpoint-20", "checkpoint-30", "latest"]
    assert not (run / ".ckptguard/trash/checkpoint-10").exists()


def test_a_running_process_protects_what_it_names(make_run: MakeRun, ckptguard: Callable[..., Any]) -> None:
    run = make_run()
    command = [sys.executable, "-c", "import time; time.sleep(60)", "--resume", str(run / "checkpoint-10")]
    with subprocess.Popen(command) as process:
        try:
            document = json.loads(ckptguard("prune", run, "--keep-last", 1, "--json").stdout)
        finally:
            process.kill()
    assert {"a running process names it"} <= {w for d in document["keep"] for w in d["why"]}
    assert [d["step"] for d in document["delete"]] == [20]


@pytest.mark.s3
def test_with_a_replica_and_on_it(
    make_run: MakeRun, ckptguard: Callable[..., Any], s3_bucket: str, s3_server: Any
) -> None:
    run, url = make_run(), f"{s3_bucket}/runs/a"
    assert ckptguard("replicate", run / "checkpoint-10", run / "checkpoint-30", url).exit_code == 0
    done = ckptguard("prune", run, "--keep-last", 1, "--replica", url, "--apply")
    assert done.exit_code == 0, done.output
    assert names(run) == ["checkpoint-20", "checkpoint-30"]
    assert "not proven on" in done.stdout

    client, bucket = s3_server.client(), s3_bucket.removeprefix("s3://")
    client.create_multipart_upload(Bucket=bucket, Key="runs/a/checkpoint-40/model.safetensors")
    done = ckptguard(
        "prune", url, "--keep-last", 1, "--grace", "0s", "--older-than", "0s", "--apply", "--json"
    )
    document = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert [d["step"] for d in document["delete"]] == [10]
    assert [d["kind"] for d in document["debris"]] == ["multipart upload"]
    listed = [o["Key"] for o in client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert {k.split("/")[2] for k in listed} == {"checkpoint-30", ".ckptguard"}
    assert not any("checkpoint-10" in k for k in listed)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)


def test_what_changes_after_the_plan_is_left(make_run: MakeRun) -> None:
    from ckptguard.inspect import Options
    from ckptguard.prune_run import apply_prune, plan_run

    run = make_run()
    (planned,) = plan_run(str(run), Policy(last=1), Options())
    (run / "checkpoint-10/optimizer.pt").write_bytes(b"saved anew")
    outcomes = {Path(r.path).name: r.error for r in apply_prune(planned)}
    assert outcomes["checkpoint-20"] is None and "changed since" in str(outcomes["checkpoint-10"])
    assert names(run) == ["checkpoint-10", "checkpoint-30"]

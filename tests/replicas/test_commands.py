"""The commands as a user calls them: exit statuses, documents, and what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptguard.inspect import Options, audit
from ckptguard.model import Severity
from ckptguard.replica_report import with_stores

pytestmark = pytest.mark.s3

Run = Callable[..., Any]
MakeRun = Callable[[], Path]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_replicate_a_run_then_one_checkpoint_back(
    ckptguard: Run, make_run: MakeRun, s3_bucket: str, tmp_path: Path
) -> None:
    run = make_run()
    (run / "latest").write_text("checkpoint-30")
    done = ckptguard("replicate", run, f"{s3_bucket}/runs/a", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [c["state"] for c in document["checkpoints"]] == ["copied"] * 3
    assert document["checkpoints"][2]["pointers"] == ["latest"]
    assert {c["proven_by"][0] for c in document["checkpoints"]} == {"the store's CRC64NVME"}

    again = ckptguard("replicate", run, f"{s3_bucket}/runs/a")
    assert again.exit_code == 0
    assert again.stdout.count("present") == 3 and "0 B sent" in again.stdout

    back = ckptguard("replicate", f"{s3_bucket}/runs/a/checkpoint-20", tmp_path / "back")
    assert back.exit_code == 0, back.output
    (report,) = audit(str(tmp_path / "back"))
    assert [(v.step, v.resume) for v in report.checkpoints] == [(20, "exact")]


def test_a_broken_checkpoint_is_not_replicated(ckptguard: Run, make_run: MakeRun, s3_bucket: str) -> None:
    run = make_run()
    damage(run / "checkpoint-20/optimizer.pt")
    done = ckptguard("replicate", run, s3_bucket, "--json")
    assert done.exit_code == 1
    states = {c["path"].rpartition("-")[2]: c["state"] for c in json.loads(done.stdout)["checkpoints"]}
    assert states == {"10": "copied", "20": "refused", "30": "copied"}
    assert "crc-mismatch" in done.stderr


def test_replicate_refuses_what_cannot_work(ckptguard: Run, make_run: MakeRun, s3_bucket: str) -> None:
    run = make_run()
    assert ckptguard("replicate", run).exit_code == 2
    assert ckptguard("replicate", run / "nowhere", s3_bucket).exit_code == 2
    gone = ckptguard("replicate", run / "checkpoint-10", "s3://no-such-bucket-here/x", "--json")
    assert gone.exit_code == 2
    assert "no bucket" in gone.stdout


def test_the_same_verdict_on_s3_and_on_disk(
    ckptguard: Run, make_run: MakeRun, s3_bucket: str, s3_server: Any
) -> None:
    run = make_run()
    damage(run / "checkpoint-10/optimizer.pt")
    (run / "checkpoint-20/scheduler.pt").unlink()
    with (run / "checkpoint-30/model.safetensors").open("r+b") as file:
        file.truncate(1000)
    client, bucket = s3_server.client(), s3_bucket.removeprefix("s3://")
    for path in sorted(p for p in run.rglob("*") if p.is_file()):
        client.upload_file(str(path), bucket, f"runs/a/{path.relative_to(run).as_posix()}")
    options = Options(grace=0)
    (here,), (there,) = audit(str(run), options), audit(f"{s3_bucket}/runs/a", options)

    def said(report: Any) -> list[Any]:
        return [
            (
                v.step,
                v.resume,
                [(f.code, f.severity, f.effect, f.subject) for f in v.findings],
                v.coverage.bytes_proven,
            )
            for v in report.checkpoints
        ]

    assert said(here) == said(there)
    assert {v.resume for v in here.checkpoints} == {"unsafe", "lossy"}


def test_audit_with_a_replica(make_run: MakeRun, s3_bucket: str, s3_server: Any, ckptguard: Run) -> None:
    run, url = make_run(), f"{s3_bucket}/runs/a"
    assert ckptguard("replicate", run, url).exit_code == 0
    options = Options(grace=0)
    (report,) = with_stores(str(run), audit(str(run), options), options, url)
    assert [f for f in report.findings if f.severity > Severity.INFO] == []
    key = "runs/a/checkpoint-20/optimizer.pt"
    data = (run / "checkpoint-20/optimizer.pt").read_bytes()
    s3_server.client().put_object(Bucket=s3_bucket.removeprefix("s3://"), Key=key, Body=data[:-4] + b"oops")
    for target, replica in (
        (str(run), url),
        (url, str(run)),
        (f"{run}/checkpoint-20", f"{url}/checkpoint-20"),
    ):
        (report,) = with_stores(target, audit(target, options), options, replica)
        (found,) = (f for f in report.findings if f.code == "replica-mismatch")
        assert found.subject == "checkpoint-20" and "optimizer.pt" in found.message


def test_repair_plans_then_mends(ckptguard: Run, make_run: MakeRun, s3_bucket: str) -> None:
    run, url = make_run(), f"{s3_bucket}/runs/a"
    assert ckptguard("replicate", run, url).exit_code == 0
    target = run / "checkpoint-20"
    sound = ckptguard("repair", target, "--from", url)
    assert (sound.exit_code, "nothing to repair" in sound.stdout) == (0, True)

    damage(target / "optimizer.pt")
    (target / "scheduler.pt").unlink()
    plan = ckptguard("repair", target, "--from", url, "--json")
    assert plan.exit_code == 0, plan.output
    document = json.loads(plan.stdout)
    assert [d["file"] for d in document["damaged"]] == ["optimizer.pt", "scheduler.pt"]
    assert not document["applied"] and not (target / "scheduler.pt").exists()

    done = ckptguard("repair", target, "--from", f"{url}/checkpoint-20", "--apply")
    assert done.exit_code == 0, done.output
    assert (
        "is exact" in done.stdout
        and "the damaged one is kept: .ckptguard/damaged/checkpoint-20-" in done.stdout
    )
    assert ckptguard("repair", target, "--drop-damaged", "--apply").exit_code == 0
    assert list((run / ".ckptguard/damaged").iterdir()) == []


def test_repair_brings_back_what_is_gone_and_refuses_what_it_cannot_prove(
    ckptguard: Run, make_run: MakeRun, s3_bucket: str
) -> None:
    run, url = make_run(), f"{s3_bucket}/runs/a"
    assert ckptguard("replicate", run, url).exit_code == 0
    (run / "checkpoint-20").rename(run.parent / "gone")
    done = ckptguard("repair", run / "checkpoint-20", "--from", url, "--apply")
    assert (done.exit_code, "is exact" in done.stdout) == (0, True), done.output

    # Sound by itself and not equal: re-saved since, perhaps. Safetensors carry no checksum that could tell.
    damage(run / "checkpoint-10/model.safetensors")
    refused = ckptguard("repair", run / "checkpoint-10", "--from", url, "--apply")
    assert refused.exit_code == 1 and "nothing shows that it is damaged" in refused.stderr
    assert ckptguard("repair", run / "checkpoint-99", "--from", url).exit_code == 2
    assert ckptguard("repair", f"{url}/checkpoint-10", "--from", run).exit_code == 2


def test_audit_preflight_and_their_options(
    ckptguard: Run, make_run: MakeRun, s3_bucket: str, tmp_path: Path
) -> None:
    run, url = make_run(), f"{s3_bucket}/runs/a"
    assert ckptguard("replicate", run / "checkpoint-10", run / "checkpoint-20", url).exit_code == 0
    done = ckptguard("audit", run, "--replica", url, "--json")
    assert done.exit_code == 0, done.output
    assert {f["code"] for f in json.loads(done.stdout)["findings"] if f["severity"] != "info"} == {
        "upload-lag"
    }

    done = ckptguard("preflight", url, "--stage", tmp_path / "fast", "--quiet")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(tmp_path / "fast/checkpoint-20")
    assert (tmp_path / "fast/checkpoint-20/optimizer.pt").stat().st_size > 1000


def test_a_copy_without_findings_is_said_to_be_proven_and_by_what(
    ckptguard: Run, make_run: MakeRun, s3_bucket: str
) -> None:
    run = make_run()
    assert ckptguard("replicate", run, s3_bucket).exit_code == 0
    done = ckptguard("audit", run, "--replica", s3_bucket, "--depth", "structure")
    assert f"copy at {s3_bucket}: checkpoint-30: 6 files: 6 unproven" in done.stdout
    done = ckptguard("audit", run, "--replica", s3_bucket)
    assert f"copy at {s3_bucket}: checkpoint-30: 6 files: 6 proven by CRC64NVME" in done.stdout


def test_what_is_silenced_of_a_copy_is_information(
    ckptguard: Run, make_run: MakeRun, s3_bucket: str, s3_server: Any
) -> None:
    run = make_run()
    assert ckptguard("replicate", run, s3_bucket).exit_code == 0
    key = "checkpoint-20/optimizer.pt"
    s3_server.client().delete_object(Bucket=s3_bucket.removeprefix("s3://"), Key=key)
    command = ("audit", run, "--replica", s3_bucket, "--json", "--strict")
    loud = ckptguard(*command)
    codes = {f["code"] for f in json.loads(loud.stdout)["findings"] if f["severity"] != "info"}
    assert (loud.exit_code, codes) == (1, {"upload-incomplete"})
    silenced = ckptguard(*command, "--silence", "upload-incomplete=the lab moves@2999-01-01")
    (found,) = [f for f in json.loads(silenced.stdout)["findings"] if f["code"] == "upload-incomplete"]
    assert (silenced.exit_code, found["severity"]) == (0, "info")


def test_a_bucket_may_have_the_name_of_a_folder_of_checkpoints(
    make_run: MakeRun, s3_bucket: str, s3_server: Any
) -> None:
    """`RUN/checkpoints/x` belongs to RUN; but there is nothing above a bucket."""
    run, client = make_run(), s3_server.client()
    client.create_bucket(Bucket="checkpoints")
    for path in run.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "checkpoints", f"run b/{path.relative_to(run).as_posix()}")
    for target in ("s3://checkpoints/run b", "s3://checkpoints"):
        (report,) = audit(target, Options(grace=0))
        assert [(v.step, v.resume) for v in report.checkpoints] == [
            (10, "exact"),
            (20, "exact"),
            (30, "exact"),
        ]

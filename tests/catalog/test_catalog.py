"""The catalog on both databases: what is written is kept, once, and is what is read."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import func, insert, select
from sqlalchemy.exc import IntegrityError

from ckptguard.catalog import (
    Catalog,
    checkpoints,
    digests,
    findings,
    jobs,
    logs,
    open_catalog,
    outbox,
    retention,
)
from ckptguard.catalog.restores import record_restore
from ckptguard.catalog.runs import ensure_run, find_run, get_run, set_run
from ckptguard.catalog.tables import alerts, metadata, verdicts
from ckptguard.catalog.tables import findings as findings_table
from ckptguard.catalog.troubles import Trouble, decide
from ckptguard.catalog.verdicts import history, record_verdict
from ckptguard.errors import ConfigError, StoreError
from ckptguard.model import Severity

NEW = {"phase": "complete", "phase_since": 1.0, "first_seen": 1.0, "step": 20, "fingerprint": "f1"}


def a_run(catalog: Catalog) -> int:
    with catalog.write() as c:
        return ensure_run(c, "runs/a", name="a", now=1.0, total_steps=None, gpus=8)


def a_checkpoint(catalog: Catalog, run: int, path: str = "checkpoint-20") -> int:
    with catalog.write() as c:
        return checkpoints.put_checkpoint(c, run, path, NEW)


def verdict(resume: str = "exact", evidence: str = "content", *codes: str) -> dict[str, Any]:
    return {
        "path": "runs/a/checkpoint-20", "layout": "hf-trainer", "step": 20, "resume": resume, "evidence": evidence,
        "files": 2, "bytes": 100, "components": {"model": True}, "gaps": [], "coverage": {"checks": 3},
        "health": {"status": "unknown"},
        "findings": [
            {"code": c, "severity": "error", "effect": "unsafe", "subject": "x", "message": "m", "hint": "h"} for c in codes
        ],
    }  # fmt: skip


def row(catalog: Catalog, checkpoint: int) -> dict[str, Any]:
    with catalog.read() as c:
        found: dict[str, Any] = next(r for r in checkpoints.of_run(c, 1, gone=True) if r["id"] == checkpoint)
        return found


def test_the_migrations_make_exactly_the_tables_of_the_program(catalog: Catalog) -> None:
    with catalog.read() as c:
        assert compare_metadata(MigrationContext.configure(c), metadata) == []


def test_two_services_that_start_at_once_migrate_once(url: str) -> None:
    opened: list[Catalog] = []
    threads = [threading.Thread(target=lambda: opened.append(open_catalog(url))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4
    for catalog in opened:
        catalog.close()


def test_what_fails_half_way_leaves_nothing(catalog: Catalog) -> None:
    with pytest.raises(ZeroDivisionError), catalog.write() as c:
        ensure_run(c, "runs/a", name="a", now=1.0, total_steps=None, gpus=None)
        _ = 1 / 0
    with catalog.read() as c:
        assert find_run(c, "runs/a") is None


def test_a_run_is_found_by_target_name_and_number_and_keeps_its_id(catalog: Catalog) -> None:
    run = a_run(catalog)
    assert run == a_run(catalog)
    with catalog.read() as c:
        for text in ("runs/a", "runs/a/", "a", str(run)):
            found = find_run(c, text)
            assert found is not None
            assert found["id"] == run
        assert find_run(c, "b") is None


def test_the_newest_verdict_is_what_the_checkpoint_says_and_all_are_history(catalog: Catalog) -> None:
    run = a_run(catalog)
    checkpoint = a_checkpoint(catalog, run)
    with catalog.write() as c:
        record_verdict(c, run, checkpoint, verdict(), "f1", 10.0)
        record_verdict(c, run, checkpoint, verdict("unsafe", "content", "crc-mismatch"), "f1", 20.0)
    assert (row(catalog, checkpoint)["resume"], row(catalog, checkpoint)["as_complete"]) == ("unsafe", False)
    with catalog.read() as c:
        assert [v["resume"] for v in history(c, checkpoint)] == ["unsafe", "exact"]


def test_a_shallow_look_at_the_same_bytes_does_not_heal_and_new_bytes_do(catalog: Catalog) -> None:
    run = a_run(catalog)
    checkpoint = a_checkpoint(catalog, run)
    with catalog.write() as c:
        record_verdict(c, run, checkpoint, verdict("unsafe", "content", "crc-mismatch"), "f1", 10.0)
        record_verdict(c, run, checkpoint, verdict("exact", "structure"), "f1", 20.0)
    assert row(catalog, checkpoint)["resume"] == "unsafe"
    with catalog.write() as c:
        record_verdict(c, run, checkpoint, verdict("exact", "structure"), "f2", 30.0)
    assert (row(catalog, checkpoint)["resume"], row(catalog, checkpoint)["evidence"]) == (
        "exact",
        "structure",
    )


def test_a_restore_raises_the_evidence_and_a_failed_one_is_not_forgotten_by_an_audit(
    catalog: Catalog,
) -> None:
    run = a_run(catalog)
    checkpoint = a_checkpoint(catalog, run)
    good = {"result": "continuous", "evidence": "replayed", "bitwise": True, "device": "cpu", "findings": []}
    with catalog.write() as c:
        record_verdict(c, run, checkpoint, verdict(), "f1", 10.0)
        record_restore(c, run, checkpoint, good, now=11.0, took=3.0)
        record_verdict(c, run, checkpoint, verdict(), "f1", 12.0)
    assert row(catalog, checkpoint)["evidence"] == "replayed"
    with catalog.write() as c:
        record_restore(c, run, checkpoint, {**good, "result": "diverged"}, now=13.0, took=3.0)
        record_verdict(c, run, checkpoint, verdict(), "f1", 14.0)
    assert row(catalog, checkpoint)["resume"] == "unsafe"


def test_a_finding_lives_from_its_first_sight_to_the_look_that_misses_it(catalog: Catalog) -> None:
    run = a_run(catalog)
    one = {
        "code": "low-space",
        "severity": "error",
        "effect": "none",
        "subject": "s",
        "message": "1",
        "hint": "",
    }
    with catalog.write() as c:
        assert findings.sync_findings(c, run, None, "space", [one, one], 1.0) == (1, 0)
        assert findings.sync_findings(c, run, None, "space", [{**one, "message": "2"}], 2.0) == (0, 0)
        assert findings.sync_findings(c, run, None, "audit", [], 3.0) == (0, 0), (
            "another source says nothing of it"
        )
        assert findings.sync_findings(c, run, None, "space", [], 4.0) == (0, 1)
        assert findings.sync_findings(c, run, None, "space", [one], 5.0) == (1, 0)
        known = c.execute(select(findings_table).order_by(findings_table.c.id)).all()
    assert [(f.first_seen, f.gone_at, f.message) for f in known] == [(1.0, 4.0, "2"), (5.0, None, "1")]


def test_digests_of_an_unchanged_file_stay_those_of_first_sight(catalog: Catalog) -> None:
    run = a_run(catalog)
    checkpoint = a_checkpoint(catalog, run)
    file = {"name": "m", "size": 3, "modified": 1.5, "etag": None, "block_size": 8, "blocks": ["aa"]}
    with catalog.write() as c:
        digests.remember_files(c, checkpoint, [file], 1.0)
        digests.remember_files(c, checkpoint, [{**file, "blocks": ["bb"]}], 2.0)
        assert [(f["blocks"], f["read_at"]) for f in digests.remembered_files(c, checkpoint)] == [
            (["aa"], 1.0)
        ]
        digests.remember_files(c, checkpoint, [{**file, "modified": 2.5, "blocks": ["bb"]}], 3.0)
        assert [(f["blocks"], f["first_seen"]) for f in digests.remembered_files(c, checkpoint)] == [
            (["bb"], 3.0)
        ]


def trouble(key: str = "runs/a:x") -> Trouble:
    return Trouble(key, "runs/a", 1, "crc-mismatch", Severity.ERROR, "t", "m", "h", 5.0)


def say(catalog: Catalog, run: int, troubles: list[Trouble], now: float) -> int:
    with catalog.write() as c:
        return outbox.apply(
            c,
            decide(troubles, outbox.standing(c, run), now, 100.0),
            now,
            sinks=lambda severity, code: ["one", "two"],
            work_at_risk={"steps": 3},
            url=lambda run, checkpoint: None,
            target="runs/a",
        )


def test_an_alert_goes_once_to_each_sink_and_its_end_too(catalog: Catalog) -> None:
    run = a_run(catalog)
    assert [say(catalog, run, [trouble()], 10.0), say(catalog, run, [trouble()], 20.0)] == [2, 0]
    assert say(catalog, run, [], 30.0) == 2
    with catalog.read() as c:
        sent = outbox.due(c, "one", 40.0)
        assert [(m["document"]["state"], m["document"]["first_seen"]) for m in sent] == [
            ("firing", "1970-01-01T00:00:05Z"),
            ("resolved", "1970-01-01T00:00:05Z"),
        ]
        assert sent[0]["document"]["work_at_risk"] == {"steps": 3}


def test_one_key_cannot_fire_twice_even_if_two_looks_race(catalog: Catalog) -> None:
    run = a_run(catalog)
    say(catalog, run, [trouble()], 10.0)
    with pytest.raises(IntegrityError), catalog.write() as c:
        c.execute(
            insert(alerts).values(
                key="runs/a:x", run_id=run, code="c", severity="error", state="firing", title="", message="", hint="",
                first_seen=1.0, said_at=1.0,
            )
        )  # fmt: skip


def test_a_sink_that_fails_keeps_its_own_and_holds_back_no_other(catalog: Catalog) -> None:
    run = a_run(catalog)
    say(catalog, run, [trouble()], 10.0)
    with catalog.write() as c:
        (message,) = outbox.due(c, "one", 10.0)
        outbox.mark_failed(c, message["id"], "refused", 50.0)
        assert outbox.due(c, "one", 49.0) == []
        assert len(outbox.due(c, "two", 49.0)) == 1
        assert outbox.pending(c)["one"] == (1, 10.0, "refused")
        outbox.mark_sent(c, outbox.due(c, "one", 51.0)[0]["id"], 51.0)
        assert "one" not in outbox.pending(c)
        assert outbox.drop_unknown(c, ["one"], 60.0) == 1


def test_jobs_are_queued_once_claimed_once_by_priority_and_recovered(catalog: Catalog) -> None:
    run = a_run(catalog)
    with catalog.write() as c:
        first = jobs.enqueue(c, "audit", now=1.0, run_id=run)
        assert jobs.enqueue(c, "audit", now=2.0, run_id=run) == first
        urgent = jobs.enqueue(c, "scrub", now=3.0, priority=5)
    with catalog.write() as c:
        taken = jobs.claim(c, 4.0)
        assert taken is not None
        assert taken["id"] == urgent
        assert (jobs.claim(c, 4.0) or {})["id"] == first
        again = jobs.enqueue(c, "audit", now=5.0, run_id=run)
        assert again != first
        assert jobs.claim(c, 5.0) is None, "the same job of the same run works already"
        assert jobs.recover(c, 6.0) == 2
        assert (jobs.claim(c, 7.0) or {})["name"] == "scrub"
        assert jobs.cancel(c, again, 8.0) == "queued"
        assert jobs.claim(c, 9.0) is None
        assert jobs.last_started(c)[("scrub", None)] == 7.0


def test_many_threads_never_claim_one_job_twice(catalog: Catalog) -> None:
    run = a_run(catalog)
    with catalog.write() as c:
        for number in range(30):
            checkpoint = checkpoints.put_checkpoint(c, run, f"c{number}", NEW)
            jobs.enqueue(c, f"job-{number}", now=1.0, run_id=run, checkpoint_id=checkpoint)
    claimed: list[int] = []

    def work() -> None:
        while True:
            with catalog.write() as c:
                job = jobs.claim(c, 2.0)
            if job is None:
                return
            claimed.append(job["id"])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == len(set(claimed)) == 30


def test_a_curve_stays_bounded_and_keeps_what_is_odd(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_ROWS", 50)
    run = a_run(catalog)
    none = {"attempt": 1, "at": None, "lr": None, "grad_norm": None, "loss_scale": None}
    with catalog.write() as c:
        for step in range(400):
            loss = None if step == 333 else 1.0
            logs.add_metrics(c, run, [{"step": step, "loss": loss, **none}])
        kept = [r["step"] for r in logs.curve(c, run)]
    assert len(kept) <= 101
    assert 333 in kept
    assert kept[0] == 0
    assert kept[-1] == 399


def test_retention_forgets_history_and_never_the_newest_verdict(catalog: Catalog) -> None:
    run = a_run(catalog)
    checkpoint = a_checkpoint(catalog, run)
    with catalog.write() as c:
        record_verdict(c, run, checkpoint, verdict(), "f1", 10.0)
        record_verdict(c, run, checkpoint, verdict("lossy"), "f1", 20.0)
        gone = retention.forget(c, 100.0)
        assert gone["verdicts"] == 1
        assert c.execute(select(func.count()).select_from(verdicts)).scalar() == 1
        set_run(c, run, state="running")
        assert (get_run(c, run) or {})["state"] == "running"


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("mysql://x", ConfigError, "no catalog can be kept in mysql"),
        ("nonsense", ConfigError, "cannot be understood"),
        ("sqlite:////proc/no/catalog.db", StoreError, "/proc/no/catalog.db: "),
        ("postgresql+psycopg://u:hush@127.0.0.1:1/x", StoreError, r"u:\*\*\*@127\.0\.0\.1:1/x: .*refused"),
    ],
)
def test_a_catalog_that_cannot_be_opened_says_why_and_no_password(url: str, error: type, text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        open_catalog(url)
    assert "hush" not in str(caught.value)

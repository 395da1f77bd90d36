"""What is decided about a copy, without any store."""

from __future__ import annotations

from ckptguard.model import Entry, Finding, Pointer, Severity
from ckptguard.replicas import (
    DAY,
    CheckpointCopy,
    CopyState,
    copy_findings,
    expires,
    file_copy,
    pointer_findings,
    retention_findings,
    upload_findings,
)
from ckptguard.storage._base import DeletedObject, ExpiryRule, OpenUpload, Retention
from ckptguard.storage.checksums import Answer, Comparison

NOW = 1_000_000.0
FILE = Entry("c/model.pt", 1000, NOW - DAY)


def codes(findings: object) -> list[tuple[str, Severity]]:
    return [(f.code, f.severity) for f in findings if isinstance(f, Finding)]  # type: ignore[attr-defined]


def test_each_state_of_a_file() -> None:
    upload = OpenUpload("c/model.pt", "id", NOW - 600, 3, 500)
    gone = DeletedObject("c/model.pt", NOW - 60, "v1")
    short = Entry("c/model.pt", 400, NOW)
    states = {
        CopyState.ABSENT: file_copy("m", FILE, None),
        CopyState.UPLOADING: file_copy("m", FILE, None, upload=upload, deleted=gone, now=NOW),
        CopyState.DELETED: file_copy("m", FILE, None, deleted=gone, now=NOW),
        CopyState.PARTIAL: file_copy("m", FILE, short),
        CopyState.UNPROVEN: file_copy("m", FILE, FILE),
        CopyState.PROVEN: file_copy("m", FILE, FILE, comparison=Comparison(Answer.SAME, "CRC32C")),
        CopyState.DIFFERENT: file_copy(
            "m", FILE, FILE, comparison=Comparison(Answer.DIFFERENT, "CRC32C", "a", "b")
        ),
    }
    assert all(copy.state is state for state, copy in states.items())
    assert states[CopyState.UPLOADING].why == "upload open for 10 min: 3 parts, 500 B of 1 kB"
    assert states[CopyState.PARTIAL].why == "400 of 1000 bytes"


def checkpoint(path: str, age: float, *states: CopyState) -> CheckpointCopy:
    copies = [file_copy(f"f{n}", FILE, None) for n in range(len(states))]
    files = tuple(type(c)(c.name, c.size, state) for c, state in zip(copies, states, strict=True))
    return CheckpointCopy(path, None, NOW - age, files)


def test_what_is_said_of_a_copy_depends_on_its_age() -> None:
    whole = checkpoint("a", 3 * DAY, CopyState.PROVEN, CopyState.PROVEN)
    pruned = checkpoint("old", 9 * DAY, CopyState.ABSENT)
    partial = checkpoint("b", 2 * DAY, CopyState.PROVEN, CopyState.PARTIAL)
    late = checkpoint("c", DAY, CopyState.ABSENT, CopyState.ABSENT)
    young = checkpoint("d", 60, CopyState.PROVEN, CopyState.UPLOADING)
    younger = checkpoint("e", 30, CopyState.ABSENT)
    found = [
        (f.subject, f.code, f.severity)
        for f in copy_findings([whole, pruned, partial, young, younger], "s3://b/r", NOW, 900)
    ]
    assert found == [
        ("old", "upload-incomplete", Severity.INFO),
        ("b", "upload-incomplete", Severity.WARNING),
        ("d", "upload-incomplete", Severity.INFO),
    ]
    assert codes(copy_findings([whole, late], "s3://b/r", NOW, 900)) == [("upload-lag", Severity.WARNING)]
    assert codes(copy_findings([checkpoint("x", DAY, CopyState.DIFFERENT)], "r", NOW, 900)) == [
        ("replica-mismatch", Severity.WARNING)
    ]


def test_only_an_idle_upload_is_an_orphan() -> None:
    idle = OpenUpload("c/m", "1", NOW - 3 * DAY, 2, 99, NOW - 2 * DAY)
    busy = OpenUpload("c/m", "2", NOW - 3 * DAY, 2, 99, NOW - 60)
    assert [f.code for f in upload_findings([idle, busy], NOW)] == ["orphaned-multipart"]


def test_pointers_ahead_of_their_data() -> None:
    old, new = Entry("latest", 9, NOW - DAY), Entry("latest", 9, NOW - 10)
    pointers = [
        Pointer(old, "text", "c20", "c20"),
        Pointer(old, "text", "c30", None),
        Pointer(new, "text", "c20", "c20"),
        Pointer(old, "text", "c10", "c10"),
    ]
    found = codes(pointer_findings(pointers, {"c20": False, "c10": True}, "s3://b/r", NOW, 900))
    assert found == [
        ("early-pointer", Severity.ERROR),
        ("dangling-pointer", Severity.ERROR),
        ("early-pointer", Severity.INFO),
    ]


def test_rules_that_delete_the_newest_safe_checkpoint() -> None:
    files = {"runs/a/c/model.pt": FILE}
    soon, later = ExpiryRule("tidy", "runs/", days=2), ExpiryRule("slow", "", days=90)

    def risk(*rules: ExpiryRule, only: bool = False) -> list[Finding]:
        return list(retention_findings(Retention(rules), "c", files, "s3://b/runs/a", NOW, only=only))

    assert codes(risk(soon)) == [("retention-risk", Severity.ERROR)]
    assert (
        "'tidy'" in risk(soon, only=True)[0].message and "the only safe" in risk(soon, only=True)[0].message
    )
    assert codes(risk(later)) == [("retention-risk", Severity.INFO)]
    assert risk(ExpiryRule("tagged", "", days=1, tagged=True), ExpiryRule("other", "logs/", days=1)) == []
    refused = Retention(unknown=("access denied",))
    assert codes(retention_findings(refused, "c", files, "s3://b", NOW, only=True)) == [
        ("retention-risk", Severity.INFO)
    ]


def test_a_lock_outlasts_a_rule() -> None:
    rule = ExpiryRule("tidy", "", days=2)
    assert expires(rule, "k", FILE, Retention((rule,))) == NOW + DAY
    assert expires(rule, "k", FILE, Retention((rule,), lock_days=10)) == NOW + 9 * DAY
    assert expires(ExpiryRule("big", "", days=1, min_size=5000), "k", FILE, Retention()) is None

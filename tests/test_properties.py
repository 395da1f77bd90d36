"""Promises that hold for all inputs: a flipped bit is found, a further finding never helps, threads change nothing."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.codes import CODES, finding
from ckptguard.facts import Reader, Wanted
from ckptguard.formats._nested import Held
from ckptguard.formats._zip_archive import CENTRAL, LOCAL, read_archive
from ckptguard.inspect import Options, audit
from ckptguard.judge import judge
from ckptguard.model import (
    CheckpointFacts,
    Coverage,
    Effect,
    Entry,
    Evidence,
    Finding,
    Manifest,
    ManifestFile,
    Resume,
    Severity,
    State,
)
from ckptguard.report.document import reports_document
from ckptguard.storage.local import LocalStore

# --- one flipped bit ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("archive") / "ckpt_1.pt"
    torch.save({"model": {"w": torch.randn(40), "b": torch.randn(7).bfloat16()}, "step": 1}, path)
    return path


@cache
def indifferent(data: bytes) -> frozenset[int]:
    """Bytes of a torch archive that nothing depends on: versions, times, attributes; sizes that a descriptor repeats."""
    found: set[int] = set()
    directory = read_archive(Held(data)).directory
    for record in read_archive(Held(data)).records.values():
        header = record.header
        # version, flags' high byte, times; with a descriptor (flag 8) torch leaves CRC and sizes to it
        found |= {header + i for i in (4, 5, 7, 10, 11, 12, 13, *range(14, 26))}
    at = directory
    while data[at : at + 4] == b"PK\x01\x02":
        name, extra, comment = struct.unpack_from("<HHH", data, at + 28)
        found |= {at + i for i in (*range(4, 10), *range(12, 16), *range(34, 42))}
        at += CENTRAL.size + name + extra + comment
    # The end records: versions, disks, and the length of the first, which readers take for granted.
    found |= {at + i for i in range(4, 24)}  # the record's own length, versions, disks
    locator = data.rindex(b"PK\x06\x07")
    # An archive this small can be read without its 64-bit records.
    found |= {locator + i for i in (*range(8), *range(16, 20))}
    end = data.rindex(b"PK\x05\x06")
    found |= {end + i for i in range(4, 10)} | {end + 20, end + 21}
    return frozenset(found)


def problems(path: Path) -> set[str]:
    entry = Entry(path.name, path.stat().st_size, 0.0)
    manifest = Manifest(path.name, "torch-file", (ManifestFile(path.name, entry, format="torch"),))
    with Reader(LocalStore(path.parent), 1) as reader:
        facts = reader.read(manifest, Wanted(Evidence.CONTENT, {}))[path.name]
    return {
        p.code
        for p in facts.problems
        if CODES[p.code].effect is Effect.UNSAFE or p.code == "unindexed-tensor"
    }


def flipped(archive: Path, at: int, bit: int) -> set[str]:
    data = bytearray(archive.read_bytes())
    data[at] ^= 1 << bit
    copy = archive.with_name("flipped.pt")
    copy.write_bytes(data)
    return problems(copy)


@given(st.data())
@settings(max_examples=150)
def test_a_flipped_bit_is_found(archive: Path, data: st.DataObject) -> None:
    raw = archive.read_bytes()
    at = data.draw(st.integers(0, len(raw) - 1).filter(lambda i: i not in indifferent(raw)))
    assert flipped(archive, at, data.draw(st.integers(0, 7)))


@pytest.mark.soak
def test_every_flipped_bit_is_found(archive: Path) -> None:
    raw = archive.read_bytes()
    silent = [
        (at, bit)
        for at in range(len(raw))
        if at not in indifferent(raw)
        for bit in range(8)
        if not flipped(archive, at, bit)
    ]
    assert not silent


def test_most_of_an_archive_is_covered(archive: Path) -> None:
    raw = archive.read_bytes()
    assert problems(archive) == set()
    per_record = LOCAL.size + CENTRAL.size
    assert len(indifferent(raw)) < per_record * (len(read_archive(Held(raw)).records) + 2)


@given(st.data())
@settings(max_examples=40)
def test_a_cut_or_a_hole_is_found(archive: Path, data: st.DataObject) -> None:
    raw = archive.read_bytes()
    end = data.draw(st.integers(0, len(raw) - 1))
    copy = archive.with_name("cut.pt")
    copy.write_bytes(raw[:end])
    assert problems(copy)
    start = data.draw(st.integers(0, len(raw) - 65))
    hole = raw[:start] + bytes(64) + raw[start + 64 :]
    copy.write_bytes(hole)
    changed = {i for i in range(start, start + 64) if raw[i]}
    assert problems(copy) or changed <= indifferent(raw)


# --- the verdict --------------------------------------------------------------------------------------

ORDER = [Resume.EXACT, Resume.LOSSY, Resume.UNKNOWN, Resume.UNSAFE]
findings = st.builds(
    lambda code, severity, effect: finding(code, "f", "m", severity=severity, effect=effect),
    st.sampled_from(sorted(CODES)),
    st.none() | st.sampled_from(list(Severity)),
    st.none() | st.sampled_from(list(Effect)),
)


def verdict_of(found: list[Finding], *, now: float = 1e9, grace: float = 0.0, finished: bool = True) -> Any:
    entry = Entry("ckpt_1.pt", 10, 0.0)
    manifest = Manifest(
        "ckpt_1.pt", "torch-file", (ManifestFile("ckpt_1.pt", entry),), step=1, finished=finished
    )
    facts = CheckpointFacts(manifest, {}, State(), Evidence.CONTENT)
    return judge(facts, found, Coverage(), path="ckpt_1.pt", now=now, grace=grace)


@given(st.lists(findings, max_size=6), findings)
def test_one_more_finding_never_helps(found: list[Finding], more: Finding) -> None:
    before, after = verdict_of(found), verdict_of([*found, more])
    assert ORDER.index(after.resume) >= ORDER.index(before.resume)
    assert before.as_complete_as_the_run_allows or not after.as_complete_as_the_run_allows


@given(st.lists(findings, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_findings_means_nothing(found: list[Finding], random: Any) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    one, two = verdict_of(found), verdict_of(shuffled)
    assert (one.resume, sorted(map(repr, one.findings))) == (two.resume, sorted(map(repr, two.findings)))


@given(st.lists(findings, max_size=4))
def test_young_and_unfinished_is_writing_and_never_safe(found: list[Finding]) -> None:
    verdict = verdict_of(found, now=10.0, grace=900.0, finished=False)
    assert not verdict.resume.safe


def test_a_verdict_is_neither_true_nor_false() -> None:
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(verdict_of([]))


# --- threads ------------------------------------------------------------------------------------------


def test_any_number_of_threads_gives_the_same_document(tmp_path: Path) -> None:
    from ckptguard import scan

    torch.manual_seed(0)
    for step in (1, 2, 3):
        model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Linear(300, 300))
        torch.save({"model": model.state_dict(), "step": step}, tmp_path / f"ckpt_{step}.pt")
    with (tmp_path / "ckpt_2.pt").open("r+b") as file:
        file.seek(200_000)
        file.write(b"\xff\xff\xff")
    documents = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SEGMENT", 1 << 16)
        patch.setattr(scan, "PIECE", 1 << 14)
        for jobs in (1, 2, 7):
            reports = audit(str(tmp_path), Options(jobs=jobs, grace=0.0, now=lambda: 2e9))
            documents.add(json.dumps(reports_document(reports), sort_keys=True, default=str))
    assert len(documents) == 1
    assert "crc-mismatch" in documents.pop()


def test_a_replaced_field_is_another_verdict() -> None:
    verdict = verdict_of([])
    assert replace(verdict, resume=Resume.UNSAFE) != verdict

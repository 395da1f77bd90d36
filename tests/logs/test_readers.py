"""The log readers: every format that people have, and junk."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.logs import read_log
from ckptguard.logs._base import field_of
from ckptguard.logs.csv import Csv
from ckptguard.logs.jsonl import JsonLines
from ckptguard.logs.steplog import StepLog, StepLogWriter, log_name
from ckptguard.logs.tensorboard import TensorBoard
from ckptguard.logs.trainer_state import TrainerState
from ckptguard.model import LogRow
from ckptguard.storage.local import LocalStore

READERS = (StepLog(), JsonLines(), Csv(), TensorBoard(), TrainerState())
Logged = Callable[[Path], tuple[LogRow, ...]]


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("loss", "loss"),
        ("train/loss", "loss"),
        ("Train Loss", "loss"),
        ("lm loss", "loss"),
        ("learning-rate", "lr"),
        ("lr-AdamW", "lr"),
        ("lr-AdamW/pg2", None),
        ("gradient_norm", "grad_norm"),
        ("eval_loss", None),
        ("eval/loss", None),
        ("val_loss", None),
        ("valid loss", None),
        ("lr_scheduler", None),
        ("grad_norm_clipped", None),
    ],
)
def test_names(key: str, field: str | None) -> None:
    place = field_of(key)
    assert (place[0] if place else None) == field


def test_json_lines_keep_order_and_skip_junk(tmp_path: Path, logged: Logged) -> None:
    tmp_path.joinpath("metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": 4.5, "learning_rate": 0.1, "batch": "aa"}\nnot json\n[1]\n{"loss": 1}\n'
        b'{"step": 2, "loss": NaN}\n{"event": "error", "step": 2}\n{"step": 2, "loss": 4.25, "attempt": 2}\n{"step": 3, "lo'
    )
    rows = logged(tmp_path)
    assert [row.step for row in rows] == [1, 2, 2, 2]
    assert (rows[0].lr, rows[0].extra["batch"]) == (0.1, "aa")
    assert rows[1].loss is not None and math.isnan(rows[1].loss)
    assert rows[2].loss is None and rows[3].attempt == 2


def test_training_data_is_no_log(tmp_path: Path, logged: Logged) -> None:
    tmp_path.joinpath("data.jsonl").write_text('{"text": "hello", "id": 1}\n')
    tmp_path.joinpath("labels.csv").write_text("id,label\n1,2\n")
    assert logged(tmp_path) == ()
    tmp_path.joinpath("zz_train_log.jsonl").write_text('{"current_steps": 5, "loss": 1.5, "lr": 1e-4}\n')
    assert [row.step for row in logged(tmp_path)] == [5]


def test_lightning_versions_are_one_log(tmp_path: Path, logged: Logged) -> None:
    for version, first in ((2, 11), (10, 21)):
        folder = tmp_path / "lightning_logs" / f"version_{version}"
        folder.mkdir(parents=True)
        folder.joinpath("metrics.csv").write_text(
            f"epoch,lr-AdamW,step,train_loss\n,0.1,{first},\n0,,{first},2.5\n"
        )
    rows = logged(tmp_path)
    assert [(row.step, row.loss, row.lr) for row in rows] == [
        (11, None, 0.1),
        (11, 2.5, None),
        (21, None, 0.1),
        (21, 2.5, None),
    ]


def test_trainer_state_of_the_newest_checkpoint(tmp_path: Path, logged: Logged) -> None:
    for step in (9, 10):
        history = [{"step": s, "loss": 1.0 / s, "learning_rate": 0.1} for s in range(5, step + 1)]
        history.append({"step": step, "train_loss": 0.3, "train_runtime": 1.0})
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        folder.joinpath("trainer_state.json").write_text(
            json.dumps({"log_history": history, "logging_steps": 5})
        )
    rows = logged(tmp_path)
    assert [(row.step, row.span) for row in rows[:2]] == [(5, 5), (6, 1)]
    assert rows[-2].step == 10 and rows[-1].loss is None and rows[-1].extra["train_loss"] == 0.3
    tmp_path.joinpath("checkpoint-10", "trainer_state.json").write_text("{")
    assert logged(tmp_path)[-1].step == 9


def _event(step: int, tag: bytes, value: float) -> bytes:
    scalar = b"\x0a" + bytes([len(tag)]) + tag + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + bytes([len(scalar)]) + scalar
    event = (
        b"\x09" + struct.pack("<d", 7.0) + b"\x10" + bytes([step]) + b"\x2a" + bytes([len(summary)]) + summary
    )
    return struct.pack("<Q", len(event)) + bytes(4) + event + bytes(4)


def test_event_files_of_a_resumed_run(tmp_path: Path, logged: Logged) -> None:
    folder = tmp_path / "tb"
    folder.mkdir()
    for part, steps in ((1, (1, 2, 3)), (10, (3, 4))):
        data = b"".join(
            _event(s, b"train/loss", s / 2) + _event(s, b"train/lr", 0.5) + _event(s, b"eval/loss", 9.0)
            for s in steps
        )
        folder.joinpath(f"events.out.tfevents.{part}.node.0").write_bytes(data)
    folder.joinpath("events.out.tfevents.9.node.1").write_bytes(b"junk")
    rows = logged(tmp_path)
    assert [(row.step, row.loss, row.lr, row.extra["part"]) for row in rows] == [
        (1, 0.5, 0.5, 0), (2, 1.0, 0.5, 0), (3, 1.5, 0.5, 0), (3, 1.5, 0.5, 2), (4, 2.0, 0.5, 2),
    ]  # fmt: skip
    assert rows[0].extra["eval/loss"] == 9.0


def test_event_files_of_several_starts_and_phases(tmp_path: Path, logged: Logged) -> None:
    for folder, begun, step in (("Nov30_10-00-00_a", 5, 1), ("Dec01_09-00-00_a", 7, 2), ("validation", 6, 9)):
        path = tmp_path / "runs" / folder
        path.mkdir(parents=True)
        path.joinpath(f"events.out.tfevents.{begun}.a.1").write_bytes(_event(step, b"loss", 2.0))
    assert [row.step for row in logged(tmp_path)] == [1, 2]


def test_event_file_torn_anywhere() -> None:
    data = _event(1, b"loss", 2.0) + _event(1, b"lr", 0.5) + _event(2, b"loss", 1.5)
    whole = TensorBoard().rows(data)
    assert [(row.step, row.loss, row.lr) for row in whole] == [(1, 2.0, 0.5), (2, 1.5, None)]
    for cut in range(len(data)):
        assert [row.step for row in TensorBoard().rows(data[:cut])] in ([], [1], [1, 2])


def test_step_log_of_two_attempts_and_ranks(tmp_path: Path, logged: Logged) -> None:
    folder = tmp_path / ".ckptguard"
    for rank in (0, 1):
        with StepLogWriter(folder / log_name(rank), rank) as log:
            log.event("start", 0, {})
            for step in (1, 2, 3):
                log.step(step, {"loss": float(step), "grad_norm": float("inf")})
        with (folder / log_name(rank)).open("ab") as torn:
            torn.write(b'{"attempt":1,"step":4,"lo')
        with StepLogWriter(folder / log_name(rank), rank) as log:
            assert log.attempt == 2
            log.step(3, {"loss": 3.5})
    tmp_path.joinpath("metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    rows = [row for row in logged(tmp_path) if row.loss is not None]
    assert [(row.attempt, row.step, row.extra["rank"]) for row in rows] == [
        (1, 1, 0), (1, 1, 1), (1, 2, 0), (1, 2, 1), (1, 3, 0), (1, 3, 1), (2, 3, 0), (2, 3, 1),
    ]  # fmt: skip


def test_a_named_log_of_any_kind(tmp_path: Path) -> None:
    tmp_path.joinpath("log.txt").write_text('{"step": 1, "loss": 9.0}\n')
    assert [row.loss for row in read_log(LocalStore(tmp_path), "log.txt")] == [9.0]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
def test_junk_is_survived(data: bytes) -> None:
    for reader in READERS:
        reader.rows(data)
        reader.rows(b'{"log_history": ' + data + b"}")
        reader.rows(struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4))
        reader.rows(b"step,loss\n" + data)


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"step": 1e400}', '{"step": ' + "9" * 5000 + "}", '{"step": -1, "loss": 2}']
)
def test_odd_numbers_and_nesting(line: str) -> None:
    for reader in READERS:
        assert reader.rows(line.encode()) == ()

"""An outside judge: ckpt-chaos kills a training at every file event of its save, resumes it, and says what came back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

runner = pytest.importorskip("ckpt_chaos.runner", reason="needs the package ckpt-chaos")

HERE = Path(__file__).parent
PATIENCE = 900
Choose = Callable[[str, str], bool]


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """The judge's own Trainer target: a matrix of crash points, all of them or those that `choose` (event, mode) takes."""

    run_point = runner._run_point

    def matrix(
        ranks: int = 1, *, drop_in: bool, choose: Choose | None = None, control: bool = True
    ) -> list[Any]:
        monkeypatch.delenv("CKPT_CHAOS_PREPEND_PYTHONPATH", raising=False)
        if drop_in:
            monkeypatch.setenv("CKPT_CHAOS_PREPEND_PYTHONPATH", str(HERE / "drop_in"))

        def chosen(cfg: Any, order: int, point: Any) -> Any:
            if point is None:
                return run_point(cfg, order, point) if control else {}
            rank, number, mode = point
            _, kind, name, _ = cfg["plan"][rank, number]
            wanted = choose is None or choose(f"{kind}:{name}", mode)
            return run_point(cfg, order, point) if wanted else {}

        monkeypatch.setattr(runner, "_run_point", chosen)
        # Its own limit is for idle machines: a job cut short by it would be judged as the training's failure.
        monkeypatch.setattr(runner._launch, "__defaults__", (None, 1, PATIENCE))
        rows = runner.run_matrix(tmp_path / f"matrix-{drop_in}", 2 if ranks == 1 else 1, ranks)
        runner.print_table(rows)
        return list(rows)

    return matrix


def verdicts(rows: list[Any]) -> Counter[str]:
    assert not [r.label for r in rows if r.drift], "the judge's plan does not fit this version of the Trainer"
    return Counter(r.verdict for r in rows)


@pytest.mark.hf
@pytest.mark.timeout(900)
def test_the_trainer_at_the_points_that_differ(trainer: Callable[..., list[Any]]) -> None:
    """Stock, a save that was broken off stops every later start; with the drop-in the training goes on, exactly."""
    stock = trainer(
        drop_in=False,
        choose=lambda event, mode: event == "torch.save:optimizer.pt" and mode == "before",
        control=False,
    )
    assert verdicts(stock) == {"HARD_FAIL": 1}
    points = {
        ("torch.save:optimizer.pt", "before"),
        ("safetensors.save_file:model.safetensors", "torn"),
        ("open:trainer_state.json", "before"),
    }
    guarded = trainer(drop_in=True, choose=lambda event, mode: (event, mode) in points, control=False)
    assert verdicts(guarded) == {"PASS": len(points)}
    assert {r.outcome.resumed_from_step for r in guarded} == {5}


@pytest.mark.timeout(600)
def test_a_loop_behind_ckptguard_run(tmp_path: Path) -> None:
    """Torn saves are passed over. Where the very first one was torn nothing good is there, and a person has to decide."""
    assert_only_the_first_save_stops_it(judged_loop(tmp_path, points=4))


@pytest.mark.soak
@pytest.mark.hf
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("ranks", "stock_fails", "points"), [(1, 17, 19), (2, 19, 22)])
def test_the_trainer_at_every_point(
    trainer: Callable[..., list[Any]], ranks: int, stock_fails: int, points: int
) -> None:
    guarded = verdicts(trainer(ranks, drop_in=True))
    assert guarded == {"PASS": points}
    stock = verdicts(trainer(ranks, drop_in=False))
    assert stock["HARD_FAIL"] >= stock_fails - 1, stock


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_loop_behind_ckptguard_run_at_every_point(tmp_path: Path) -> None:
    assert_only_the_first_save_stops_it(judged_loop(tmp_path, points=1000))


def assert_only_the_first_save_stops_it(rows: list[Any]) -> None:
    first = [r for r in rows if "step-4.pt [torn]" in r.label]
    assert {r.outcome.raised for r in first} <= {"ExitCode78"}
    assert {r.label: r.verdict for r in rows if r not in first and r.verdict != "PASS"} == {}
    assert len(rows) > 3


def judged_loop(tmp_path: Path, points: int) -> list[Any]:
    """The verdicts on `loop.py`, killed at `points` of its file events and resumed through `ckptguard run`."""
    programs = Path(sys.executable).parent
    train = [sys.executable, str(HERE / "loop.py"), "{out}"]
    resume = [
        str(programs / "ckptguard"),
        "run",
        "--allow-missing",
        "{out}",
        "--",
        *train,
        "{{--resume",
        "{checkpoint}}}",
    ]
    work = tmp_path / "work"
    done = subprocess.run(
        [
            str(programs / "ckpt-chaos"), "run", "--work", str(work), "--max-points", str(points), "--timeout", str(PATIENCE),
            "--checkpoint-glob", "{out}/step-*.pt", "--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/final.pt",
            "--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL", "--resume-cmd", " ".join(resume), "--", *train,
        ],
        env={k: v for k, v in os.environ.items() if not k.startswith("CKPTGUARD")} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    return list(runner.rejudge(work))

"""`ckptguard restore` from the command line: exit statuses, documents, the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

from ckptguard.codes import finding
from ckptguard.model import Evidence, NotRun
from ckptguard.report.plot import Band, Line, line_chart, ticks
from ckptguard.report.restore_page import restore_page
from ckptguard.restore.model import ComparedStep, Noise, RestoreReport


def restore(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "ckptguard", "restore", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_proven_continuous_exits_0_with_document_and_page(recipe, recorded_run, tmp_path):
    page = tmp_path / "restore.html"
    done = restore(
        recorded_run / "ckpt_12.pt", "--recipe", recipe("plain_loop:Loop"), "--json", "--html", page
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["result"], document["evidence"], document["bitwise"]) == ("continuous", "replayed", True)
    assert document["noise"]["repeats"] == 2 and document["noise"]["loss"] == 0
    assert document["steps"][0]["logged"]["loss"] == document["steps"][0]["replayed"]["loss"]
    assert "replayed step 13" in done.stderr or "restore 2 of 2" in done.stderr
    html = page.read_text()
    assert "bit for bit" in html and html.count("<svg") == 4


@pytest.fixture
def command(here):
    """The command in this process, its trials too: `command(*arguments)`."""
    from typer.testing import CliRunner

    from ckptguard.cli import build_app

    app = build_app()
    return lambda *arguments: CliRunner().invoke(app, ["restore", *map(str, arguments)])


@pytest.mark.parametrize(
    "options, words",
    [
        (["--html", "."], "--html .: it is a directory"),
        (["--html", "no/such/page.html"], "lies in no directory that exists"),
        (["--metrics", "log.jsonl"], "--metrics names the log that --command writes"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_restored(command, recipe, logged_run, options, words):
    done = command(logged_run / "ckpt_12.pt", "--recipe", recipe("plain_loop:Loop"), "--json", *options)
    assert done.exit_code == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "usage" and words in error["message"]
    assert "restore 1 of 2" not in done.stderr


def test_damage_exits_1_and_names_it_to_people(command, recipe, recorded_run, copy):
    run = copy(recorded_run)
    state = torch.load(run / "ckpt_12.pt", weights_only=False)
    del state["scheduler"]
    torch.save(state, run / "ckpt_12.pt")
    done = command(run / "ckpt_12.pt", "--recipe", recipe("plain_loop:Loop"))
    assert done.exit_code == 1
    assert "Failed" in done.stdout.splitlines()[0] and "nothing for scheduler" in done.stdout
    assert "DIFFERS" in done.stdout and "What to do:" in done.stdout


def test_without_a_later_step_it_exits_3(command, recipe, logged_run):
    done = command(logged_run / "ckpt_24.pt", "--recipe", recipe("plain_loop:Loop"), "--quiet")
    assert (done.exit_code, done.stderr) == (3, "")
    assert len(done.stdout.splitlines()) == 1 and "Unproven" in done.stdout


@pytest.mark.parametrize(
    "name, options, code",
    [
        ("Hangs", ("--timeout", "4s"), "timeout"),
        ("EatsMemory", ("--max-memory", "700MB"), "memory"),
    ],
)
def test_what_is_not_the_checkpoints_fault_exits_2(recipe, logged_run, name, options, code):
    done = restore(logged_run / "ckpt_12.pt", "--recipe", recipe(f"plain_loop:{name}"), "--json", *options)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == code and error["message"] and error["hint"]


def test_usage_and_absence_exit_2(command, recipe, logged_run):
    for arguments, code in [
        ((logged_run / "ckpt_12.pt",), "usage"),
        ((logged_run / "ckpt_99.pt", "--recipe", recipe("plain_loop:Loop")), "not-found"),
        ((logged_run / "ckpt_12.pt", "--recipe", "x.py:Y", "--timeout", "soon"), "usage"),
        ((logged_run / "ckpt_12.pt", "--recipe", recipe("plain_loop:Raises")), "recipe"),
    ]:
        done = command(*arguments, "--json")
        assert (done.exit_code, json.loads(done.stdout)["error"]["code"]) == (2, code)


def test_the_parent_process_never_imports_torch():
    code = (
        "import sys; from ckptguard.restore import validate, Request; import ckptguard.report.restore_page\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- the page ---------------------------------------------------------------------------------------------


def report(**changes: object) -> RestoreReport:
    steps = tuple(
        ComparedStep(
            s,
            s < 22,
            s < 22,
            {"loss": 2.0, "lr": 0.1},
            {"loss": 2.0 + (s - 21), "lr": 0.1},
            {"loss": 0.01, "lr": 0.0},
        )
        for s in (21, 22, 23)
    )
    values = {
        "checkpoint": "runs/<a>/ckpt_20.pt",
        "result": "diverged",
        "evidence": Evidence.REPLAYED,
        "bitwise": False,
        "device": "cpu",
        "steps": steps,
        "noise": Noise(2, {"loss": (0.0, 0.0, 0.0)}, {"loss": (0.0,)}, "ckpt_10.pt"),
        "findings": (finding("replay-divergence", "step 22", "loss 3 replayed, 2 logged"),),
        "not_run": (NotRun("probe", "the recipe has no probe()"),),
        "environment": {"torch": "2.13", "device": "cpu"},
        "recorded_environment": {"torch": "2.12", "device": "cpu"},
    }
    return RestoreReport(**{**values, **changes})  # type: ignore[arg-type]


def test_the_page_says_everything_and_fetches_nothing():
    html = restore_page(report())
    for text in (
        "Diverged",
        "replay-divergence",
        "ckpt_10.pt",
        "What could not be proven",
        "differs",
        "runs/&lt;a&gt;/",
    ):
        assert text in html
    assert html.count("<svg") == 2 and 'class="band"' in html
    assert "<script" not in html and not re.search(r"(?:src|href|url)\s*[=(]", html)


def test_a_verdict_can_be_neither_true_nor_false():
    with pytest.raises(TypeError):
        bool(report())


def test_a_chart_leaves_gaps_and_survives_anything():
    points = [(1.0, 2.0), (2.0, float("nan")), (3.0, 4.0), (4.0, float("inf"))]
    svg = line_chart("loss", [Line("l", points, "logged", dots=True)], Band([(1.0, 1.0, float("inf"))]))
    assert svg.count("<polyline") == 2 and svg.count("<circle") == 2
    assert "nan" not in svg.lower() and "inf" not in svg.lower()
    assert "no finite numbers" in line_chart("loss", [Line("l", [(1.0, float("nan"))], "logged")])
    assert "<svg" in line_chart("flat", [Line("l", [(1.0, 0.0), (2.0, 0.0)], "logged")])
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.5, 1.0])

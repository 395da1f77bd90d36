"""The shared corpus of real checkpoints, judged as its own score.py asks: one test a case, all in one process."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckptguard.errors import CkptguardError
from ckptguard.inspect import Options, audit
from ckptguard.report.document import reports_document

CORPUS = Path(os.environ.get("CKPTGUARD_CORPUS") or Path(__file__).resolve().parents[2] / "shared" / "corpus")
CASES = sorted(p.parent for p in CORPUS.glob("*/label.json"))

if not CASES:
    pytest.skip(f"no corpus at {CORPUS}: name it by CKPTGUARD_CORPUS", allow_module_level=True)


@pytest.fixture(scope="module")
def score() -> ModuleType:
    """The corpus' own script, whose judgement counts."""
    spec = importlib.util.spec_from_file_location("corpus_score", CORPUS / "score.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def audited(target: str) -> tuple[Any, int]:
    """(document, exit status), as the command gives them."""
    try:
        reports = audit(target, Options(grace=0.0))
    except CkptguardError as error:
        return {"error": {"code": error.error_code, "message": error.message}}, error.exit_code
    bad = any(v.resume in ("unsafe", "unknown") for r in reports for v in r.checkpoints)
    return json.loads(json.dumps(reports_document(reports))), int(bad)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case(case: Path, score: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    label = json.loads((case / "label.json").read_text(encoding="utf-8"))
    monkeypatch.chdir(case / "input")
    document, status = audited(label["target"])
    problems, _, _ = score.judge(label, document, status, str((case / "input").resolve()))
    assert not problems, "\n".join(text for _, text in problems)
    assert not list(case.rglob(score.MARK)), "a payload in a pickle was executed"

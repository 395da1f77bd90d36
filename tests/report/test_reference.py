"""The reference pages say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptguard.codes import CODES
from ckptguard.registry import checks, layouts, run_checks
from ckptguard.report.reference import ELSEWHERE, HEADINGS, pages, sections

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", ["codes.md", "layouts.md"])
def test_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == pages()[name], (
        "run: python -m ckptguard.report.reference docs"
    )


def test_every_code_has_a_finder() -> None:
    found = {code for c in (*checks(), *run_checks()) for code in c.codes}
    assert CODES.keys() - found - ELSEWHERE.keys() == set()


def test_every_check_and_layout_is_described() -> None:
    text = pages()
    for check in (*checks(), *run_checks()):
        said = sections(type(check).__doc__ or "")
        assert all(said.get(heading) for heading in HEADINGS), check.name
        assert f"## {check.name}\n" in text["codes.md"]
    for layout in layouts():
        assert f"## {layout.name}\n" in text["layouts.md"]

"""Pointers of a run that goes on while it is looked at."""

from __future__ import annotations

from pathlib import Path

from ckptguard.inspect import Options, audit
from ckptguard.testing_service import saves


def test_a_pointer_that_moves_during_the_look_to_a_newer_save_is_not_dangling(tmp_path: Path) -> None:
    """The listing is older than what the pointer says when it is read."""
    made = saves(range(10, 40, 10))
    for step in (10, 20):
        (tmp_path / f"step_{step}.pt").write_bytes(made[step])
    (tmp_path / "latest").write_text("step_20.pt")

    def goes_on(_name: str, _count: int) -> None:
        (tmp_path / "step_30.pt").write_bytes(made[30])
        (tmp_path / "latest").write_text("step_30.pt")

    (report,) = audit(str(tmp_path), Options(grace=0.0), goes_on)
    assert [f.code for f in report.findings] == []
    assert [v.resume for v in report.checkpoints] == ["exact", "exact"]

    (tmp_path / "latest").write_text("step_40.pt")
    (report,) = audit(str(tmp_path), Options(grace=0.0))
    assert [f.code for f in report.findings] == ["dangling-pointer"]

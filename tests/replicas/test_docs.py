"""The commands of the S3 chapters, in their order, as a reader would type them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.s3
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs/s3.md"


@pytest.mark.parametrize(
    ("text", "least", "left"),
    [
        (DOCS, 15, ["checkpoint-30"]),
        (ROOT / "README.md", 8, ["checkpoint-10", "checkpoint-20", "checkpoint-30"]),
    ],
    ids=["docs", "readme"],
)
def test_every_command_works(
    text: Path,
    least: int,
    left: list[str],
    ckptguard: Callable[..., Any],
    make_run: Callable[[], Path],
    s3_bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run()
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs/a")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```sh\n(.*?)```", text.read_text(), re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line.strip()]
    assert len(commands) >= least
    for line in commands:
        if "repair" in line and "--apply" not in line:
            damaged = tmp_path / "runs/a/checkpoint-30/optimizer.pt"
            data = bytearray(damaged.read_bytes())
            data[len(data) // 2] ^= 1
            damaged.write_bytes(data)
        name, *arguments = shlex.split(line.replace("s3://bucket", s3_bucket), comments=True)
        assert name == "ckptguard"
        done = ckptguard(*arguments)
        assert done.exit_code == 0, f"{line}\n{done.output}"
    assert sorted(p.name for p in (tmp_path / "runs/a").iterdir() if p.is_dir()) == [".ckptguard", *left]


def test_every_finding_code_of_the_chapter_exists() -> None:
    from ckptguard.codes import CODES

    codes = re.findall(r"^\| `([a-z-]+)`(?:, `([a-z-]+)`)? \|", DOCS.read_text(), re.MULTILINE)
    named = {code for pair in codes for code in pair if code}
    assert named and named <= set(CODES)

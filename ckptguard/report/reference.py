"""The reference pages, written from the code: `python -m ckptguard.report.reference docs` writes docs/codes.md and docs/layouts.md.

What the pages say stands in the table of codes and in the docstrings of checks and layouts; a test holds that they are
current.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

from ckptguard.codes import CODES, Code
from ckptguard.ports import Check, RunCheck
from ckptguard.registry import checks, layouts, run_checks

HEADINGS = ("Finds", "Why it matters", "Example", "What to do", "Blind spots")
SCOPES = {"C": "a checkpoint", "R": "a run", "S": "a store or a replica"}

# Codes that no check of an audit gives, and who does.
ELSEWHERE: Mapping[str, str] = {
    "check-failed": "`ckptguard audit`, where a check or a reader of its own fails",
    "unknown-layout": "`ckptguard audit`, which then ends with exit status 2",
    "launch-mismatch": "`ckptguard preflight` with a launch plan (`--world-size`, `--launch`, ...)",
    "restore-failed": "`ckptguard restore`",
    "state-mismatch": "`ckptguard restore`",
    "probe-mismatch": "`ckptguard restore`",
    "batch-mismatch": "`ckptguard restore`",
    "rng-stream-mismatch": "`ckptguard restore`",
    "replay-divergence": "`ckptguard restore`",
    "upload-incomplete": "`ckptguard audit --replica`, and the service",
    "replica-mismatch": "`ckptguard audit --replica`, and the service",
    "orphaned-multipart": "`ckptguard audit --replica`, and the service",
    "upload-lag": "the service",
    "retention-risk": "`ckptguard prune`, and the service",
    "low-space": "the service",
    "missed-save": "the service",
    "stalled-save": "the service",
    "slow-save": "the service",
    "odd-size": "the service",
    "loss-discontinuity": "`ckptguard diagnose`, and the service",
}


def sections(text: str) -> dict[str, str]:
    """A check's docstring by its headings; the first line under ""."""
    found: dict[str, list[str]] = {"": []}
    here = ""
    for line in dedent(text).strip().splitlines():
        match = re.match(rf"\s*({'|'.join(HEADINGS)}): ?(.*)", line)
        if match:
            here, line = match.group(1), match.group(2)
        found.setdefault(here, []).append(line.strip())
    return {name: " ".join(part for part in lines if part) for name, lines in found.items()}


def codes_page() -> str:
    """docs/codes.md: every finding code, then every check."""
    every: list[Check | RunCheck] = [*checks(), *run_checks()]
    lines = [
        "# Finding codes",
        "",
        "Written from the code by `python -m ckptguard.report.reference docs`. Codes are never renamed. Severity says how loud a",
        "finding is, the effect what it does to a resume; a check may lower both where there is a legitimate exception.",
        "",
        "| code | of | severity | effect |",
        "| --- | --- | --- | --- |",
        *(
            f"| [{c.name}](#{c.name}) | {SCOPES[c.scope]} | {c.severity} | {c.effect} |"
            for c in CODES.values()
        ),
        "",
    ]
    for code in CODES.values():
        lines += _code(code, [c for c in every if code.name in c.codes])
    lines += ["# Checks", ""]
    for check in every:
        lines += _check(check)
    return "\n".join(lines).rstrip() + "\n"


def _code(code: Code, found_by: Iterable[Any]) -> list[str]:
    names = [f"[{c.name}](#check-{c.name})" for c in found_by]
    by = ", ".join(names) if names else ELSEWHERE[code.name]
    return [
        f"## {code.name}",
        "",
        f"{_sentence(code.meaning)} ({code.severity}, effect {code.effect}; concerns {SCOPES[code.scope]}.)",
        "",
        f"- What to do: {code.todo}",
        f"- Found by: {by}",
        "",
    ]


def _check(check: Any) -> list[str]:
    said = sections(type(check).__doc__ or "")
    needs = getattr(check, "needs", None)
    return [
        f'<a id="check-{check.name}"></a>',
        "",
        f"## {check.name}",
        "",
        said[""],
        "",
        *(f"- {heading}: {said[heading]}" for heading in HEADINGS if said.get(heading)),
        f"- Gives: {', '.join(f'[{code}](#{code})' for code in check.codes)}",
        *(
            [f"- Needs: evidence `{needs}`"]
            if needs is not None
            else ["- Needs: the verdicts on the run's checkpoints"]
        ),
        "",
    ]


def layouts_page() -> str:
    """docs/layouts.md: every layout in the order of detection."""
    lines = [
        "# Layouts",
        "",
        "Written from the code by `python -m ckptguard.report.reference docs`, in the order in which layouts are asked. A layout",
        "recognises a checkpoint by names alone; what it is then shows in its content.",
        "",
        "How far bytes can be proven depends on their container: every record of a `torch.save` archive and every item of a DCP",
        "shard carries a CRC-32, which PyTorch writes and never checks; safetensors payloads, files in torch's old format and",
        "archives written with `set_crc32_options(False)` carry none, and need a [seal](recorder.md) or a replica. What no",
        "audit sees, measured for each layout, is listed in [blind spots](blind-spots.md).",
        "",
    ]
    for layout in layouts():
        text = dedent(sys.modules[type(layout).__module__].__doc__ or "").strip()
        head, _, rest = text.partition("\n\n")
        lines += [f"## {layout.name}", "", *_paragraphs(head), *_paragraphs(rest)]
    return "\n".join(lines).rstrip() + "\n"


def _paragraphs(text: str) -> list[str]:
    return [
        line
        for paragraph in text.split("\n\n")
        if paragraph.strip()
        for line in (*paragraph.splitlines(), "")
    ]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def pages() -> dict[str, str]:
    """Every page by its name."""
    return {"codes.md": codes_page(), "layouts.md": layouts_page()}


def main(folder: str) -> None:
    """Write the pages into a folder."""
    for name, text in pages().items():
        (Path(folder) / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs")

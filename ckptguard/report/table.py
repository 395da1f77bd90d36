"""Reports for people: a table of checkpoints and the findings below, coloured on a terminal, plain in a pipe."""

from __future__ import annotations

from typing import IO, Any

from ckptguard.model import Finding, Resume, RunReport, Severity, Verdict

COLOURS = {
    Resume.EXACT: "green",
    Resume.LOSSY: "yellow",
    Resume.UNKNOWN: "magenta",
    Resume.UNSAFE: "red",
    Resume.WRITING: "cyan",
}
MARKS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "dim"}


def print_report(report: RunReport, stream: IO[str], *, verbose: bool = False) -> None:
    """One run's table and findings."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # In a pipe nothing knows the width of what reads it: lines are as long as they are.
    console = Console(
        file=stream, highlight=False, soft_wrap=True, emoji=False, width=None if stream.isatty() else 400
    )
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for title, side in (
        ("checkpoint", "left"),
        ("step", "right"),
        ("layout", "left"),
        ("resume", "left"),
        ("evidence", "left"),
        ("size", "right"),
        ("proven", "right"),
        ("findings", "left"),
    ):
        table.add_column(title, justify=side, overflow="fold", no_wrap=title != "findings")  # type: ignore[arg-type]
    for verdict in report.checkpoints:
        table.add_row(*_row(verdict, Text))
    console.print(table)
    for verdict in report.checkpoints:
        _findings(console, verdict.path, verdict.findings, verbose, Text)
    _findings(console, report.root, report.findings, verbose, Text)
    console.print()
    console.print(
        Text.assemble(
            "resume from  ",
            (report.resume_from or "none", "bold green" if report.resume_from else "bold red"),
        )
    )
    if report.latest and report.latest != report.resume_from:
        console.print(
            Text.assemble(
                "latest is    ", (report.latest, "yellow"), "  (what the framework itself would pick)"
            )
        )
    if report.newest_safe and report.newest_safe != report.resume_from:
        console.print(
            Text.assemble(
                "newest safe  ",
                report.newest_safe,
                "  (lossy: it has lost more than the run's other checkpoints)",
            )
        )


def _row(verdict: Verdict, text: Any) -> list[Any]:
    loud = [f for f in verdict.findings if f.loud]
    codes = ", ".join(dict.fromkeys(f.code for f in loud)) or (
        "" if not verdict.findings else f"{len(verdict.findings)} notes"
    )
    proven = verdict.coverage.bytes_proven / verdict.bytes if verdict.bytes else 0.0
    return [
        text(verdict.path),
        "?" if verdict.step is None else str(verdict.step),
        verdict.layout,
        text(str(verdict.resume), style=COLOURS[verdict.resume]),
        str(verdict.evidence),
        size(verdict.bytes),
        f"{min(proven, 1.0):.0%}" if verdict.coverage.bytes_read else "-",
        codes,
    ]


def _findings(console: Any, where: str, findings: tuple[Finding, ...], verbose: bool, text: Any) -> None:
    shown = [f for f in findings if f.loud or verbose]
    if not shown:
        return
    console.print()
    console.print(text(where, style="bold"))
    for one in shown:
        console.print(
            text.assemble(
                "  ", (f"{one.severity}", MARKS[one.severity]), " ", (one.code, "bold"), "  ", one.message
            )
        )
        if one.hint and one.loud:
            console.print(text(f"      {one.hint}", style="dim"))


def size(count: float) -> str:
    """Bytes for people: 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError

"""`ckptguard audit`: find every checkpoint under each target and judge it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ckptguard.cli._output import emit_json, guarded, parsed

EPILOG = """Examples:\n
  ckptguard audit runs/a                        every checkpoint of a run, every byte read once\n
  ckptguard audit runs/a --depth structure      headers, indexes and small state only: seconds, whatever the size\n
  ckptguard audit s3://bucket/run --json        the document of the contract, for scripts\n
  ckptguard audit runs/a/checkpoint-500         one checkpoint, judged with its siblings in view\n
Exit status: 0 none is unsafe or unknown, 1 at least one is, 2 could not look."""


def register(app: typer.Typer) -> None:
    app.command(name="audit", epilog=EPILOG)(audit)


def audit(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="TARGET...", help="Run or checkpoint: a local path or s3://bucket/prefix."),
    ],
    depth: Annotated[str, typer.Option(help="How deep to look: listing, structure or content.")] = "content",
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress; with no --json, no table either.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show notes too, not only warnings and errors.")
    ] = False,
    grace: Annotated[
        str, typer.Option(help="An unfinished save changed within this time is being written, not broken.")
    ] = "15m",
    strict: Annotated[
        bool, typer.Option(help="Every warning and error counts for the exit status, those of the run too.")
    ] = False,
    require: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="Anything less proven than this counts as unknown.")
    ] = None,
    record: Annotated[bool, typer.Option(help="Keep the verdicts under RUN/.ckptguard/verdicts/.")] = False,
    max_age: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Accept a recorded verdict that young, if nothing changed."),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Give up after this time; what was not read is unknown."),
    ] = None,
    silence: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE=REASON@DATE", help="Make a code information until that date."),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROOT", help="Judge the union with this directory: shards on several nodes' disks."
        ),
    ] = None,
    replica: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Compare the run with its copy there.")
    ] = None,
    max_rate: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Read at most this many bytes a second (200MB).")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=256, help="Threads that read. Default: the cores, at most 8.")
    ] = None,
) -> None:
    """Find every checkpoint under each TARGET and judge it: exact, lossy, unsafe."""
    with guarded(json):
        from ckptguard.cli._look import depth_of, progress
        from ckptguard.inspect import Options, audit
        from ckptguard.model import Severity
        from ckptguard.replica_report import with_stores
        from ckptguard.report.document import reports_document
        from ckptguard.report.table import print_report
        from ckptguard.units import parse_duration, parse_size

        options = Options(
            depth=depth_of(depth),
            jobs=jobs,
            grace=parsed(parse_duration, grace, "--grace"),
            max_rate=parsed(parse_size, max_rate, "--max-rate"),
            require=None if require is None else depth_of(require, "--require"),
        )
        reports = []
        for target in targets:
            with progress(target, quiet=quiet) as show:
                found = audit(target, options, show)
            reports += with_stores(target, found, options, replica)
        if json:
            emit_json(reports_document(tuple(reports)))
        elif not quiet:
            for report in reports:
                print_report(report, sys.stdout, verbose=verbose)
        bad = any(v.resume in ("unsafe", "unknown") for r in reports for v in r.checkpoints)
        if strict:
            bad = bad or any(
                f.severity > Severity.INFO
                for r in reports
                for v in r.checkpoints
                for f in (*v.findings, *r.findings)
            )
        raise typer.Exit(1 if bad else 0)

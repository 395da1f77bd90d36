"""`ckptguard audit`: find every checkpoint under each target and judge it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from ckptguard.cli._options import (
    Also,
    Config,
    Depth,
    Grace,
    Jobs,
    MaxAge,
    MaxRate,
    Require,
    SilenceCodes,
    Timeout,
    hard_limit,
    look_options,
)
from ckptguard.cli._output import emit_json, guarded

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
    depth: Depth = "content",
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress; with no --json, no table either.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show notes too, not only warnings and errors.")
    ] = False,
    grace: Grace = "15m",
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Every warning and error counts for the exit status, those of the run too."
        ),
    ] = False,
    require: Require = None,
    record: Annotated[
        bool, typer.Option("--record", help="Keep the verdicts under RUN/.ckptguard/verdicts/.")
    ] = False,
    max_age: MaxAge = None,
    timeout: Timeout = None,
    silence: SilenceCodes = None,
    config: Config = None,
    also: Also = None,
    replica: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Compare the run with its copy there.")
    ] = None,
    max_rate: MaxRate = None,
    jobs: Jobs = None,
) -> None:
    """Find every checkpoint under each TARGET and judge it: exact, lossy, unsafe."""
    with guarded(json):
        from ckptguard.cli._look import progress
        from ckptguard.inspect import audit
        from ckptguard.model import RunReport, Severity
        from ckptguard.replica_report import with_stores
        from ckptguard.replicas import CheckpointCopy, in_words
        from ckptguard.report.document import reports_document
        from ckptguard.report.table import print_report
        from ckptguard.verdicts import record as keep

        options = look_options(
            depth=depth,
            grace=grace,
            require=require,
            max_age=max_age,
            timeout=timeout,
            silence=silence,
            config=config,
            also=also,
            max_rate=max_rate,
            jobs=jobs,
            quiet=quiet,
        )
        reports: list[RunReport] = []
        copies: list[str] = []

        def told(where: str, there: Sequence[CheckpointCopy]) -> None:
            copies.extend(f"copy at {where}: {copy.path or 'it'}: {in_words(copy)}" for copy in there)

        for target in targets:
            began = time.time()
            with progress(target, quiet=quiet) as show, hard_limit(options, json):
                found = audit(target, options, show)
            for report in found if record else ():
                keep(target, report.checkpoints, report.root, began)
            reports += with_stores(target, found, options, replica, told)
        if json:
            emit_json(reports_document(tuple(reports)))
        elif not quiet:
            for report in reports:
                print_report(report, sys.stdout, verbose=verbose)
            for line in copies:
                print(line)
        bad = any(v.resume in ("unsafe", "unknown") for r in reports for v in r.checkpoints)
        if strict:
            bad = bad or any(
                f.severity > Severity.INFO
                for r in reports
                for v in r.checkpoints
                for f in (*v.findings, *r.findings)
            )
        raise typer.Exit(1 if bad else 0)

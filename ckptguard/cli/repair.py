"""`ckptguard repair`: heal a damaged checkpoint from a copy of it."""

from __future__ import annotations

import sys
from shlex import quote
from typing import Annotated

import typer

from ckptguard.cli._output import emit_json, guarded, say

EPILOG = """Examples:\n
  ckptguard repair runs/a/checkpoint-500 --from s3://bucket/runs/a            what is damaged, and what would be fetched\n
  ckptguard repair runs/a/checkpoint-500 --from s3://bucket/runs/a --apply    fetch it, verify, exchange\n
  ckptguard repair runs/a/checkpoint-500 --drop-damaged --apply               remove what earlier repairs kept\n
The damaged checkpoint is kept below RUN/.ckptguard/damaged/ until told otherwise.\n
Exit status: 0 done, or nothing to do, 1 refused or still not safe, 2 could not look."""


def register(app: typer.Typer) -> None:
    app.command(name="repair", epilog=EPILOG)(repair)


def repair(
    checkpoint: Annotated[str, typer.Argument(help="The damaged checkpoint, on disk.")],
    replica: Annotated[
        str | None,
        typer.Option("--from", metavar="REPLICA", help="Its copy, or the copy of its run: local or s3://."),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Do it; else only the plan is shown.")] = False,
    drop_damaged: Annotated[
        bool,
        typer.Option("--drop-damaged", help="Remove what earlier repairs kept of the damaged checkpoint."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Find the damaged ranges of CHECKPOINT, fetch only those from its replica, verify, and exchange it."""
    with guarded(json):
        from ckptguard import repair_one
        from ckptguard.errors import UsageError
        from ckptguard.inspect import Options
        from ckptguard.units import size

        if drop_damaged:
            if not apply:
                raise UsageError("--drop-damaged removes files", "add --apply")
            dropped = repair_one.drop(checkpoint)
            if json:
                emit_json({"schema": 1, "checkpoint": checkpoint, "dropped": dropped})
            else:
                print("\n".join(f"removed {name}" for name in dropped) or "nothing was kept", file=sys.stdout)
            return
        if replica is None:
            raise UsageError("name the copy to repair from", "--from s3://bucket/run")
        done = repair_one.repair(
            checkpoint, replica, Options(), apply=apply, say=lambda text: say(text, quiet=quiet)
        )
        if json:
            emit_json(done.document())
        else:
            for file in done.plan.damaged:
                state = "missing" if file.present is None else f"{len(file.ranges)} damaged ranges"
                print(
                    f"{file.name}: {state}, {size(file.fetched)} of {size(file.size)} to fetch",
                    file=sys.stdout,
                )
            if not done.plan.damaged:
                print(f"{checkpoint}: nothing to repair, compared by {done.plan.by}", file=sys.stdout)
            elif not done.applied:
                print(
                    f"a plan only; to do it: ckptguard repair {quote(checkpoint)} --from {quote(replica)} --apply",
                    file=sys.stdout,
                )
            else:
                resume = "not recognised" if done.verdict is None else done.verdict.resume
                print(f"repaired: {checkpoint} is {resume}", file=sys.stdout)
                for kept in done.kept:
                    print(f"the damaged one is kept: {kept}", file=sys.stdout)
        bad = done.applied and (done.verdict is None or not done.verdict.resume.safe)
        raise typer.Exit(1 if bad else 0)

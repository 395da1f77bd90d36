"""`ckptguard replicate`: copy checkpoints to another place, proven."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ckptguard.cli._output import SCHEMA, emit_json, guarded, parsed, say

EPILOG = """Examples:\n
  ckptguard replicate runs/a/checkpoint-500 s3://bucket/runs/a     one checkpoint, beside others of its run\n
  ckptguard replicate runs/a s3://bucket/runs/a                    every safe checkpoint that is not there yet\n
  ckptguard replicate s3://bucket/runs/a/checkpoint-500 runs/a     and back\n
What arrives is proven by checksums; the latest pointer is moved last. A copy that was broken off goes on where it stopped.\n
Exit status: 0 all is there and proven, 1 something was refused, 2 could not look or a copy failed."""


def register(app: typer.Typer) -> None:
    app.command(name="replicate", epilog=EPILOG)(replicate)


def replicate(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT... DESTINATION", help="Checkpoints or runs, then the run to copy into."
        ),
    ],
    depth: Annotated[
        str, typer.Option(help="How deep the source is looked at first: listing, structure or content.")
    ] = "content",
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace files of the destination that hold other bytes; else they are left and exit is 1.",
        ),
    ] = False,
    grace: Annotated[
        str,
        typer.Option(help="An unfinished save changed within this time is being written: it is not copied."),
    ] = "15m",
    max_rate: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Read at most this many bytes a second (200MB).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Copy each CHECKPOINT to DESTINATION (a local run or s3://bucket/prefix) and prove that it arrived."""
    with guarded(json):
        from ckptguard.cli._look import depth_of
        from ckptguard.errors import UsageError
        from ckptguard.inspect import Options
        from ckptguard.replicate_many import replicate_all
        from ckptguard.units import parse_duration, parse_size, size

        if len(paths) < 2:
            raise UsageError(
                "name what to copy and where to", "ckptguard replicate CHECKPOINT... DESTINATION"
            )
        options = Options(
            depth=depth_of(depth),
            grace=parsed(parse_duration, grace, "--grace"),
            max_rate=parsed(parse_size, max_rate, "--max-rate"),
        )
        outcomes = []
        *sources, destination = paths
        for outcome in replicate_all(
            sources, destination, options, overwrite=overwrite, say=lambda text: say(text, quiet=quiet)
        ):
            outcomes.append(outcome)
            if outcome.error is not None:
                say(f"ckptguard: {outcome.error.message}\n  {outcome.error.hint}")
            elif not json and outcome.replica is not None:
                done = outcome.replica
                moved = f", {', '.join(done.pointers)} moved" if done.pointers else ""
                print(
                    f"{outcome.state:8} {outcome.path} -> {outcome.destination}: {len(done.files)} files, "
                    f"{size(done.size)}, {size(done.sent)} sent{moved}",
                    file=sys.stdout,
                )
        if json:
            emit_json(
                {
                    "schema": SCHEMA,
                    "destination": destination,
                    "checkpoints": [o.document() for o in outcomes],
                }
            )
        raise typer.Exit(max((o.exit_code for o in outcomes), default=0))

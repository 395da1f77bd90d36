"""`ckptguard seal`: record digests of what is there now, for later audits to compare with."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptguard.cli._output import emit_json, guarded, say

EPILOG = """Examples:\n
  ckptguard seal runs/a/checkpoint-500          right after the save, or after an audit that found it good\n
  ckptguard audit runs/a                        compares every byte with the seal from now on\n
The seal lies under RUN/.ckptguard/seals/, never inside or beside the checkpoint.
Exit status: 0 sealed; 1 refused, because it is already unsafe or another seal differs; 2 could not look."""


def register(app: typer.Typer) -> None:
    app.command(name="seal", epilog=EPILOG)(seal)


def seal(
    checkpoints: Annotated[
        list[str],
        typer.Argument(metavar="CHECKPOINT...", help="Checkpoints to seal: local paths or s3:// prefixes."),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace a seal that differs.")] = False,
    megatron: Annotated[
        bool, typer.Option("--megatron", help="Also write Megatron's own integrity.json into the checkpoint.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=256, help="Threads that read. Default: the cores, at most 8.")
    ] = None,
) -> None:
    """Record digests of every block and tensor, for later audits and repairs to compare with."""
    with guarded(json):
        from ckptguard.cli._look import progress
        from ckptguard.errors import Refused
        from ckptguard.sealing import seal_checkpoint

        done, refused = [], None
        for target in checkpoints:
            try:
                with progress(target, quiet=quiet) as show:
                    done.append(
                        seal_checkpoint(target, force=force, megatron=megatron, jobs=jobs, progress=show)
                    )
            except Refused as error:
                refused = refused or error
                done.append({"checkpoint": target, "sealed": False, "why": error.message})
                say(f"ckptguard: {error.message}\n  {error.hint}", quiet=quiet)
            else:
                say(
                    f"sealed {target}: {done[-1]['files']} files, {done[-1]['bytes']} bytes, {done[-1]['tensors']} tensors",
                    quiet=quiet,
                )
        if json:
            emit_json({"schema": 1, "sealed": done})
        raise typer.Exit(1 if refused is not None else 0)

"""`ckptguard restore`: restores a checkpoint into real objects, replays steps, and says whether the training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Restore a checkpoint into real objects, replay training steps, and compare them with what was recorded.

It runs in a child process, changes nothing in the run, and exits 0 only where it is proven that the training goes on
as it did: 1 restored wrongly or not continuous, 2 could not run, 3 unproven.

Examples:

    ckptguard restore runs/a/ckpt_1000.pt --recipe train.py:Recipe

    ckptguard restore out/checkpoint-500 --recipe train.py:make_trainer --html restore.html

    ckptguard restore runs/a/step-1000 --command 'python train.py --resume {checkpoint} --output {out}' --metrics log.jsonl

A recipe is an object with build(device), which returns the parts {"model": ..., "optimizer": ...}, and step(parts),
which does one optimizer step and returns {"loss": ...}; or a function that returns a Hugging Face Trainer.
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command("restore", help=HELP)
    def restore(
        checkpoint: Annotated[str, typer.Argument(help="The checkpoint: a file or a directory.")],
        recipe: Annotated[
            str | None, typer.Option(help="FILE.py:NAME or MODULE:NAME: how the training is built and steps.")
        ] = None,
        command: Annotated[
            str | None,
            typer.Option(
                help="The training command instead, with {checkpoint}, {out} and optionally {stop}."
            ),
        ] = None,
        metrics: Annotated[
            str | None, typer.Option(help="The log that --command writes, relative to {out}.")
        ] = None,
        log: Annotated[
            str | None, typer.Option(help="The log to compare with. Default: the run's own.")
        ] = None,
        steps: Annotated[int, typer.Option(help="How many optimizer steps to replay.", min=1)] = 8,
        against: Annotated[
            str | None,
            typer.Option(
                help="A later checkpoint: replay up to it and compare the whole state. Needs no log. "
                "Default: one within a few steps."
            ),
        ] = None,
        repeats: Annotated[
            int, typer.Option(help="How often to restore, to measure the device's noise.", min=2)
        ] = 2,
        timeout: Annotated[
            str | None, typer.Option(help="Time limit of each child process: 90s, 15m, 2h.")
        ] = "1h",
        max_memory: Annotated[
            str | None, typer.Option(help="Memory limit of each child process: 8GiB. Default: none.")
        ] = None,
        device: Annotated[
            str, typer.Option(help="cpu, cuda, cuda:1. Default: chosen automatically.")
        ] = "auto",
        nproc: Annotated[
            int, typer.Option(help="Processes of the restore; more than 1 needs --command.", min=1)
        ] = 1,
        html: Annotated[
            Path | None, typer.Option(help="Write the result as one self-contained page.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
        quiet: Annotated[
            bool, typer.Option("--quiet", help="No progress; of the result one line only.")
        ] = False,
    ) -> None:
        from ckptguard.errors import UsageError
        from ckptguard.restore.document import restore_document
        from ckptguard.restore.model import Limits
        from ckptguard.restore.validate import Request, validate
        from ckptguard.restore.words import result_lines
        from ckptguard.units import parse_duration, parse_size

        try:
            limits = Limits(
                timeout=parse_duration(timeout) if timeout is not None else None,
                max_memory=parse_size(max_memory) if max_memory is not None else None,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        request = Request(
            checkpoint=checkpoint,
            recipe=recipe,
            command=command,
            metrics=metrics,
            log=log,
            against=against,
            steps=steps,
            repeats=repeats,
            device=device,
            nproc=nproc,
            limits=limits,
        )

        def progress(text: str) -> None:
            if text and not quiet:
                typer.echo(text, err=True)

        report = validate(request, progress)
        if html is not None:
            from ckptguard.report.restore_page import restore_page

            html.write_text(restore_page(report), encoding="utf-8")
            progress(f"wrote {html}")
        if as_json:
            import json

            typer.echo(json.dumps(restore_document(report), indent=1))
        else:
            for line in result_lines(report)[: 1 if quiet else None]:
                typer.echo(line)
        raise typer.Exit(report.exit_status)

"""`ckptguard restore`: restores a checkpoint into real objects, replays steps, and says whether the training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptguard.cli._output import emit_json, guarded, parsed, say

EPILOG = """A recipe is an object with build(device), which returns the parts {"model": ..., "optimizer": ...}, and
step(parts), which does one optimizer step and returns {"loss": ...}; or a function that returns a Hugging Face Trainer
or a Lightning (Trainer, module, data).\n
Examples:\n
  ckptguard restore runs/a/ckpt_1000.pt --recipe train.py:Recipe\n
  ckptguard restore out/checkpoint-500 --recipe train.py:make_trainer --html restore.html\n
  ckptguard restore runs/a/step-1000 --command 'python train.py --resume {checkpoint} --out {out}' --metrics log.jsonl\n
Exit status: 0 proven continuous, 1 restored wrongly or not continuous, 2 could not run, 3 unproven."""


def register(app: typer.Typer) -> None:
    app.command(name="restore", epilog=EPILOG)(restore)


def restore(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="A file or directory, local or s3://bucket/run/checkpoint."
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="How the training is built and steps; or MODULE:NAME."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(help="The training command instead, with {checkpoint}, {out}, optionally {stop}."),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="FILE", help="The log that --command writes, relative to {out}.")
    ] = None,
    log: Annotated[
        str | None, typer.Option(metavar="FILE", help="The log to compare with. Default: the run's own.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="How many optimizer steps to replay.")] = 8,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT",
            help="Replay up to this later one and compare the whole state; needs no log. Default: one within a few steps.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="How often to restore, which measures the noise.")] = 2,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="Time limit of each child process: 90s, 15m, 2h.")
    ] = "1h",
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Memory limit of each child process: 8GiB. Default: none."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    nproc: Annotated[
        int, typer.Option(min=1, help="Processes of the restore, as many as trained; started by torchrun.")
    ] = 1,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result as one self-contained page.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, and one line for the result.")
    ] = False,
) -> None:
    """Restore a checkpoint into real objects, replay steps, and compare them with what was recorded.

    It runs in child processes and changes nothing in the run. It exits 0 only where it is proven that the training goes
    on as it did.
    """
    with guarded(json):
        from dataclasses import replace

        from ckptguard.errors import UsageError
        from ckptguard.report.restore_page import restore_page
        from ckptguard.restore.document import restore_document
        from ckptguard.restore.model import Limits
        from ckptguard.restore.request import Request
        from ckptguard.restore.validation import validate
        from ckptguard.restore.words import result_lines
        from ckptguard.staging import staged
        from ckptguard.units import parse_duration, parse_size

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
            limits=Limits(
                timeout=parsed(parse_duration, timeout, "--timeout"),
                max_memory=parsed(parse_size, max_memory, "--max-memory"),
            ),
        )
        if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
            # Known before the work, not after it.
            what = "is a directory" if html.is_dir() else "lies in no directory that exists"
            raise UsageError(f"--html {html}: it {what}")
        with staged(checkpoint) as local:
            request = replace(request, checkpoint=str(local))
            report = validate(request, lambda text: say(text, quiet=quiet))
        report = replace(report, checkpoint=checkpoint)
        if html is not None:
            try:
                html.write_text(restore_page(report), encoding="utf-8")
            except OSError as error:
                raise UsageError(f"--html {html}: it cannot be written: {error.strerror}") from None
            say(f"wrote {html}", quiet=quiet)
        if json:
            emit_json(restore_document(report))
        else:
            typer.echo("\n".join(result_lines(report)[: 1 if quiet else None]))
        raise typer.Exit(report.exit_status)

"""`ckptguard run`: the gate, then the training command, as if it had been started directly."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ckptguard.cli._options import (
    Config,
    Cp,
    DecisionId,
    Depth,
    Ep,
    Grace,
    Jobs,
    Launch,
    MaxAge,
    MaxRate,
    Optimizer,
    Pp,
    Precision,
    Require,
    SilenceCodes,
    Timeout,
    Tp,
    WorldSize,
    hard_limit,
    look_options,
)
from ckptguard.cli._output import emit_json, fail, guarded, say
from ckptguard.errors import UsageError

REFUSED = 78
"""EX_CONFIG: no training ends with it by accident, so that a scheduler can tell the gate's no from the command's."""

EPILOG = """Examples:\n
  ckptguard run runs/a -- torchrun train.py {{--resume {checkpoint}}}    the group is dropped on a fresh run\n
  srun ckptguard run runs/a -- python train.py {{ --resume {checkpoint} }}    one task looks, all take its decision\n
  ckptguard run s3://bucket/run --stage /local/ckpt -- python train.py {{--resume {checkpoint}}}\n
Exit status: that of COMMAND (128+N where signal N ended it); 78 when the gate itself refuses or could not look."""


class _Gate(TyperCommand):
    """Usage errors end with 78 too: 2 would read as the command's own status."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        as_json = "--json" in (args[: args.index("--")] if "--" in args else args)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except Exception as error:
            # Typer brings a click of its own in some versions: usage errors are told by what they can do.
            if not hasattr(error, "format_message"):
                raise
            with _refusing(), guarded(as_json):
                raise UsageError(error.format_message(), "ckptguard run --help shows what it takes") from None


def register(app: typer.Typer) -> None:
    app.command(name="run", cls=_Gate, epilog=EPILOG)(run)


def run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's directory or s3://bucket/prefix.")],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="What to start; {checkpoint} is replaced, {{...}} dropped on a fresh run.",
        ),
    ],
    depth: Depth = "content",
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="The decision as one document on stdout; COMMAND's output goes to stderr."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No reasons on stderr.")] = False,
    grace: Grace = "0",
    allow_lossy: Annotated[
        bool,
        typer.Option("--allow-lossy", help="Accept a checkpoint that has lost more than the run's others."),
    ] = False,
    require: Require = None,
    no_fresh: Annotated[
        bool, typer.Option("--no-fresh", help="Refuse to start where there is no checkpoint to resume from.")
    ] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="A RUN that does not exist is a fresh start.")
    ] = False,
    stage: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Bring a checkpoint on S3 here, proven; {checkpoint} is its path."),
    ] = None,
    decision_id: DecisionId = None,
    alone: Annotated[
        bool,
        typer.Option("--alone", help="Decide for this process only, whatever the scheduler says of others."),
    ] = False,
    world_size: WorldSize = None,
    tp: Tp = None,
    pp: Pp = None,
    cp: Cp = None,
    ep: Ep = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    launch: Launch = None,
    max_age: MaxAge = None,
    timeout: Timeout = None,
    silence: SilenceCodes = None,
    config: Config = None,
    max_rate: MaxRate = None,
    jobs: Jobs = None,
) -> None:
    """The gate in front of a training: looks, puts the checkpoint into COMMAND and runs it; refuses with 78."""
    from ckptguard.integrations.launcher import ending_by_signal

    with _refusing(), guarded(json), ending_by_signal():
        from ckptguard.cli._look import progress
        from ckptguard.errors import Refused
        from ckptguard.gate import ask
        from ckptguard.identity import VARIABLE
        from ckptguard.integrations.arguments import HOLE, fill
        from ckptguard.plan import plan_of

        fill(command, "")  # what is wrong with the command itself is said before anything is read
        options = look_options(
            depth=depth,
            grace=grace,
            require=require,
            max_age=max_age,
            timeout=timeout,
            silence=silence,
            config=config,
            also=None,
            max_rate=max_rate,
            jobs=jobs,
            quiet=quiet,
            allow_lossy=allow_lossy,
            beside=False,
            plan=plan_of(
                launch,
                world_size=world_size,
                tp=tp,
                pp=pp,
                cp=cp,
                ep=ep,
                precision=precision,
                optimizer=optimizer,
            ),
        )
        with hard_limit(options, json, REFUSED), progress(run, quiet=quiet) as show:
            answer = ask(
                run,
                options,
                os.environ,
                decision_id=decision_id,
                alone=alone,
                allow_missing=allow_missing,
                progress=show,
            )
        for reason in answer.reasons:
            say(f"ckptguard: {reason}", quiet=quiet)
        if answer.decision == "stop" or (answer.decision == "fresh" and no_fresh):
            why = (
                "no checkpoint of it may be resumed from"
                if answer.decision == "stop"
                else "it holds no checkpoint to resume from"
            )
            fail(Refused(f"{run}: {why}; the command was not started", f"ckptguard audit {run}"), json)
        checkpoint = answer.checkpoint
        if checkpoint is not None and stage is not None:
            checkpoint = _staged(checkpoint, stage)
        arguments = fill(command, checkpoint)
        if checkpoint is None:
            say(f"ckptguard: {run} holds no checkpoint: a fresh run", quiet=quiet)
        else:
            say(f"ckptguard: resuming from {checkpoint}", quiet=quiet)
            report = answer.report
            if (
                report is not None
                and report.latest != answer.checkpoint
                and not any(HOLE in a for a in command)
            ):
                say(
                    f"ckptguard: warning: the command names no {HOLE}; left to itself it may take {report.latest}",
                    quiet=quiet,
                )
        if json:
            from ckptguard.cli.preflight import document

            emit_json(document(run, answer.as_decision))
        environment = {**os.environ, **({VARIABLE: answer.key} if answer.key else {})}
    from ckptguard.integrations.launcher import run as start

    sys.stdout.flush()
    raise typer.Exit(start(arguments, environment, stdout_to_stderr=json))


def _staged(checkpoint: str, folder: str) -> str:
    """The checkpoint as files of this machine. The ranks of one node bring it once: the others wait and find it there."""
    import fcntl
    from pathlib import Path

    from ckptguard.staging import stage

    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    with (where / ".ckptguard-stage.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return str(stage(checkpoint, where))


@contextmanager
def _refusing() -> Iterator[None]:
    """Whatever ends the gate before the command has started ends it with 78, unless a signal did."""
    try:
        yield
    except typer.Exit as end:
        raise typer.Exit(REFUSED if end.exit_code in (1, 2) else end.exit_code) from None

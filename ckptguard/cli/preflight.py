"""`ckptguard preflight`: go or no-go before a resume, and from where."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ckptguard.cli._options import (
    Also,
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
from ckptguard.cli._output import emit_json, guarded, say

if TYPE_CHECKING:
    from ckptguard.inspect import Decision
    from ckptguard.targets import Options

EPILOG = """Examples:\n
  CKPT=$(ckptguard preflight runs/a) && torchrun train.py --resume "$CKPT"\n
  ckptguard preflight runs/a --json             the reasons for every checkpoint that was passed over\n
  ckptguard preflight runs/a --quarantine       and move unsafe ones out of the framework's sight (--undo brings them back)\n
Exit status: 0 resume from the path on stdout; 1 checkpoints exist and none may be resumed from; 2 could not look;
3 a fresh run: no checkpoint was ever seen there."""


def register(app: typer.Typer) -> None:
    app.command(name="preflight", epilog=EPILOG)(preflight)


def preflight(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's directory or s3://bucket/prefix.")],
    depth: Depth = "content",
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No reasons on stderr.")] = False,
    grace: Grace = "0",
    allow_lossy: Annotated[
        bool,
        typer.Option("--allow-lossy", help="Accept a checkpoint that has lost more than the run's others."),
    ] = False,
    require: Require = None,
    no_fresh: Annotated[
        bool,
        typer.Option("--no-fresh", help="A run without any checkpoint is a stop (1), not a fresh start (3)."),
    ] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="A RUN that does not exist is a fresh start (3).")
    ] = False,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Move unsafe checkpoints under RUN/.ckptguard/quarantine/.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Bring quarantined checkpoints back, and do nothing else.")
    ] = False,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Bring a checkpoint on S3 into this local folder, proven, and print that path.",
        ),
    ] = None,
    world_size: WorldSize = None,
    tp: Tp = None,
    pp: Pp = None,
    cp: Cp = None,
    ep: Ep = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    launch: Launch = None,
    decision_id: DecisionId = None,
    max_age: MaxAge = None,
    timeout: Timeout = None,
    silence: SilenceCodes = None,
    config: Config = None,
    also: Also = None,
    max_rate: MaxRate = None,
    jobs: Jobs = None,
) -> None:
    """Go or no-go before a resume: prints the path to resume from, and on stderr why newer ones were passed over."""
    with guarded(json):
        from ckptguard.plan import plan_of

        if undo:
            raise typer.Exit(_undo(run, json, quiet))
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
            allow_lossy=allow_lossy,
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
        with hard_limit(options, json):
            decision = _decide(run, options, decision_id, allow_missing, quiet)
        if stage is not None and decision.resume_from is not None:
            decision = staged_decision(decision, stage)
        for reason in decision.reasons:
            say(f"ckptguard: {reason}", quiet=quiet)
        if quarantine and decision.report is not None:
            _quarantine(run, decision, options, quiet)
        if json:
            emit_json(document(run, decision))
        elif decision.resume_from is not None:
            print(decision.resume_from)
        if decision.decision == "stop":
            say(f"ckptguard: no checkpoint of {run} may be resumed from", quiet=quiet)
        elif decision.decision == "fresh":
            say(f"ckptguard: {run} holds no checkpoint: a fresh run", quiet=quiet)
        sys.stdout.flush()
        raise typer.Exit({"resume": 0, "stop": 1, "fresh": 1 if no_fresh else 3}[decision.decision])


def _decide(
    run: str, options: Options, decision_id: str | None, allow_missing: bool, quiet: bool
) -> Decision:
    """The decision, made here; with an identity that of the first process that gave it."""
    from ckptguard.cli._look import progress
    from ckptguard.errors import TargetNotFound
    from ckptguard.gate import ask
    from ckptguard.inspect import Decision, preflight

    with progress(run, quiet=quiet) as show:
        if decision_id is not None:
            answer = ask(
                run, options, {}, decision_id=decision_id, allow_missing=allow_missing, progress=show
            )
            return answer.as_decision
        try:
            return preflight(run, options, show)
        except TargetNotFound:
            if not allow_missing:
                raise
            return Decision("fresh", None, None, (f"{run} does not exist",))


def staged_decision(decision: Decision, folder: str) -> Decision:
    """The decision with the path of a proven local copy. Raises Refused, StoreError: no path without a whole copy."""
    from dataclasses import replace
    from pathlib import Path

    from ckptguard.staging import stage

    assert decision.resume_from is not None
    return replace(decision, resume_from=str(stage(decision.resume_from, Path(folder))))


def document(run: str, decision) -> dict:  # type: ignore[no-untyped-def, type-arg]
    """The JSON document of preflight: that of audit, with the decision."""
    from ckptguard.report.document import SCHEMA, report_document

    body = (
        report_document(decision.report)
        if decision.report is not None
        else {
            "schema": SCHEMA,
            "target": run,
            "checkpoints": [],
            "findings": [],
            "latest": None,
            "newest_safe": None,
        }
    )
    return {**body, "resume_from": decision.resume_from, "decision": decision.decision}


def _local(run: str):  # type: ignore[no-untyped-def]
    from pathlib import Path

    from ckptguard.errors import UsageError

    if "://" in run:
        raise UsageError(
            "--quarantine works on local runs", "on S3, move the checkpoint's prefix with your own tools"
        )
    return Path(run)


def _quarantine(run: str, decision, options, quiet: bool) -> None:  # type: ignore[no-untyped-def]
    from ckptguard.inspect import find_pointers, open_target
    from ckptguard.quarantine import carry_out, plan_moves

    path = _local(run)
    opened, directory, manifests = open_target(run, options)
    verdicts = {
        m.path: v for m in manifests for v in decision.report.checkpoints if opened.shown(m.path) == v.path
    }
    good = next((m.path for m in manifests if opened.shown(m.path) == decision.resume_from), None)
    moves = plan_moves(
        manifests, verdicts, find_pointers(opened.store, directory, manifests), good, options.now()
    )
    for line in carry_out(path, moves):
        say(f"ckptguard: {line}", quiet=quiet)


def _undo(run: str, json: bool, quiet: bool) -> int:
    from ckptguard.quarantine import bring_back

    done = bring_back(_local(run))
    for line in done or ["nothing is in quarantine"]:
        say(f"ckptguard: {line}", quiet=quiet)
    if json:
        emit_json({"schema": 1, "target": run, "undone": list(done)})
    return 0

"""`ckptguard prune`: what of a run may go, and on request its removal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ckptguard.cli._output import emit_json, guarded, parsed, say

if TYPE_CHECKING:
    from ckptguard.prune_run import PrunePlan

EPILOG = """Examples:\n
  ckptguard prune runs/a --keep-last 3                                     what would go\n
  ckptguard prune runs/a --keep-last 3 --keep-every 1000 --apply           and do it\n
  ckptguard prune runs/a --keep-last 2 --replica s3://bucket/runs/a        only what is proven on the replica goes\n
  ckptguard prune runs/a --keep-best eval_loss --keep-last 1               the best one by the log, and the newest\n
Never removed: the newest safe checkpoint, one that a pointer, a link or a running process names, one that is unsafe or unknown.\n
Exit status: 0 done or planned, 1 something was refused, 2 could not look."""


def register(app: typer.Typer) -> None:
    app.command(name="prune", epilog=EPILOG)(prune)


def prune(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run: a local path or s3://bucket/prefix.")],
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", help="Keep the newest N safe checkpoints.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="K", help="Keep those whose step is a multiple of K.")
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="Keep the best by the log: METRIC (lowest), or METRIC:max."),
    ] = None,
    replica: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Remove only what is proven on this copy of the run.")
    ] = None,
    older_than: Annotated[
        str, typer.Option(metavar="DURATION", help="Left-overs and open uploads idle for so long are debris.")
    ] = "1d",
    grace: Annotated[str, typer.Option(help="What changed within this time is left alone.")] = "15m",
    depth: Annotated[
        str,
        typer.Option(help="How deep a checkpoint must be looked at to count as safe: structure or content."),
    ] = "content",
    apply: Annotated[bool, typer.Option("--apply", help="Do it; else only the plan is shown.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Plan which checkpoints of RUN to keep and which to remove; only proven safe ones count as kept."""
    with guarded(json):
        from ckptguard.cli._look import depth_of
        from ckptguard.inspect import Options
        from ckptguard.prune import Policy
        from ckptguard.prune_run import apply_prune, document, plan_run
        from ckptguard.units import parse_duration

        policy = Policy(keep_last, keep_every, keep_best)
        options = Options(depth=depth_of(depth), grace=parsed(parse_duration, grace, "--grace"))
        limit = parsed(parse_duration, older_than, "--older-than")
        say(f"{run}: looking at {options.depth}", quiet=quiet)
        documents, refused = [], False
        for plan in plan_run(run, policy, options, replica=replica, older_than=limit):
            removals = {r.path: r for r in apply_prune(plan)} if apply else None
            documents.append(document(plan, removals))
            refused = refused or bool(documents[-1]["refused"])
            if not json:
                _print(plan, apply)
            for each in documents[-1]["refused"]:
                say(f"ckptguard: {each['message']}")
        if json:
            emit_json(documents[0] if len(documents) == 1 else documents)
        elif not apply:
            print("a plan only; --apply does it", file=sys.stdout)
        raise typer.Exit(1 if refused else 0)


def _print(plan: PrunePlan, applied: bool) -> None:
    from ckptguard.units import duration, size

    for decided in plan.decided:
        word = ("removed" if applied else "remove") if decided.delete else "keep"
        print(f"{word:8} {decided.path}  {size(decided.bytes)}  {', '.join(decided.why)}")
    for debris in plan.debris:
        word = "removed" if applied else "remove"
        print(
            f"{word:8} {debris.path}  {size(debris.bytes)}  {debris.kind}, idle for {duration(debris.idle)}"
        )
    print(f"{plan.root}: {size(plan.freed)} {'freed' if applied else 'to free'}")

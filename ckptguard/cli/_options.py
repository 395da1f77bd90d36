"""Options that `audit`, `preflight` and `run` share, and what a look makes of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptguard.cli._output import SCHEMA, emit_json, parsed, say

if TYPE_CHECKING:
    from ckptguard.targets import Options

# fmt: off
Depth = Annotated[str, typer.Option(help="How deep to look: listing, structure or content.")]
Grace = Annotated[str, typer.Option(help="An unfinished save changed within this time is being written, not broken.")]
Require = Annotated[str | None, typer.Option(metavar="LEVEL", help="Anything less proven than this counts as unknown.")]
MaxAge = Annotated[str | None, typer.Option(metavar="DURATION", help="Accept a recorded verdict that young, if nothing changed (audit --record).")]
Timeout = Annotated[str | None, typer.Option(metavar="DURATION", help="Read no longer than this; what was not read is unknown.")]
SilenceCodes = Annotated[list[str] | None, typer.Option("--silence", metavar="CODE=REASON@DATE", help="Make a code information until that date; the resume stays.")]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A configuration of the service: the codes that its policy silences are silenced here too.")]
Also = Annotated[list[str] | None, typer.Option(metavar="ROOT", help="Judge the union with this directory: shards on several nodes' disks.")]
MaxRate = Annotated[str | None, typer.Option(metavar="BYTES", help="Beside a training: at most this many bytes a second (200MB), with low priority, the page cache left alone.")]
Jobs = Annotated[int | None, typer.Option(min=1, max=256, help="Threads that read. Default: the cores, at most 8.")]
DecisionId = Annotated[str | None, typer.Option(metavar="ID", help="Names this start of the job: all that give it take the decision of the first, kept in the run.")]
WorldSize = Annotated[int | None, typer.Option(min=1, help="The planned launch: processes in all. Tells what the checkpoint cannot follow (launch-mismatch).")]
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="The planned launch: tensor parallel size.")]
Pp = Annotated[int | None, typer.Option("--pp", min=1, help="The planned launch: pipeline parallel size.")]
Cp = Annotated[int | None, typer.Option("--cp", min=1, help="The planned launch: context parallel size.")]
Ep = Annotated[int | None, typer.Option("--ep", min=1, help="The planned launch: expert parallel size.")]
Precision = Annotated[str | None, typer.Option(help="The planned launch: fp32, bf16 or fp16.")]
Optimizer = Annotated[str | None, typer.Option(help="The planned launch: adamw, adafactor, lion, muon, sgd, ...")]
Launch = Annotated[str | None, typer.Option(metavar="FILE", help="The planned launch from a file: an accelerate, DeepSpeed or Megatron configuration, or training arguments.")]
# fmt: on


def look_options(
    *,
    depth: str,
    grace: str,
    require: str | None,
    max_age: str | None,
    timeout: str | None,
    silence: Sequence[str] | None,
    config: Path | None,
    also: Sequence[str] | None,
    max_rate: str | None,
    jobs: int | None,
    quiet: bool,
    allow_lossy: bool = False,
    plan: Any = None,
    beside: bool = True,
) -> Options:
    """The look that the options ask for. Raises UsageError that names the option.

    Where a rate was given the process steps back behind others, unless it is to become a training itself (`beside`).
    """
    from ckptguard.cli._look import depth_of
    from ckptguard.silences import configured, in_force, parse
    from ckptguard.targets import Options
    from ckptguard.units import parse_duration, parse_size

    now = time.time()
    silences = [parse(text) for text in silence or ()]
    if config is not None:
        from ckptguard.settings import load_policy

        silences = [*configured(load_policy(config).silence), *silences]
    reasons, expired = in_force(silences, now)
    for one in expired:
        say(f"ckptguard: the silence of {one.code} ended on {one.until}: {one.reason}", quiet=quiet)
    seconds = parsed(parse_duration, timeout, "--timeout")
    rate = parsed(parse_size, max_rate, "--max-rate")
    if rate is not None and beside:
        from ckptguard.priority import step_back

        step_back()
    return Options(
        depth=depth_of(depth),
        jobs=jobs,
        grace=parsed(parse_duration, grace, "--grace"),
        max_rate=rate,
        require=None if require is None else depth_of(require, "--require"),
        allow_lossy=allow_lossy,
        plan=plan,
        silenced=reasons,
        deadline=None if seconds is None else now + seconds,
        max_age=parsed(parse_duration, max_age, "--max-age"),
        also=tuple(also or ()),
    )


@contextmanager
def hard_limit(options: Options, as_json: bool, status: int = 2) -> Iterator[None]:
    """Ends the process where a read itself hangs past the time limit: a dead mount answers nobody.

    A little later than the limit, so that a look that still can says for itself what it has missed.
    """
    if options.deadline is None:
        yield
        return
    left = options.deadline - options.now()

    def give_up() -> None:
        message = f"the storage did not answer within the time limit of {left:.0f} s"
        hint = "is the volume reachable? Else give it more time: --timeout DURATION"
        if as_json:
            emit_json({"schema": SCHEMA, "error": {"code": "timeout", "message": message, "hint": hint}})
        say(f"ckptguard: {message}\n  {hint}")
        os._exit(status)

    timer = threading.Timer(left + max(5.0, 0.1 * left), give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

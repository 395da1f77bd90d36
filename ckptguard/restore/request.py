"""What the user asks of a restore, and what of it cannot work."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptguard.errors import UsageError
from ckptguard.restore.model import Limits


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks. `recipe` is FILE.py:NAME or MODULE:NAME, or `command` the training command."""

    checkpoint: str
    recipe: str | None = None
    command: str | None = None
    metrics: str | None = None
    log: str | None = None
    against: str | None = None
    steps: int = 8
    repeats: int = 2
    device: str = "auto"
    nproc: int = 1
    limits: Limits = field(default_factory=Limits)


def check(request: Request) -> None:
    """Raise UsageError for a request that cannot work, before anything is started."""
    if (request.recipe is None) == (request.command is None):
        raise UsageError(
            "give either --recipe or --command", "ckptguard restore CHECKPOINT --recipe FILE.py:NAME"
        )
    if request.steps < 1 or request.repeats < 1:
        raise UsageError(f"--steps must be at least 1, got {request.steps}")
    if request.command is not None and "{out}" not in request.command:
        raise UsageError(
            "--command has no {out}: the training would write into the real run",
            "give it as the training's output directory: --command 'python train.py --resume {checkpoint} --output {out}'",
        )
    if request.metrics is not None and request.command is None:
        raise UsageError("--metrics names the log that --command writes; the log to compare with is --log")
    if request.command is not None and request.against is not None:
        raise UsageError("--against needs --recipe: a command does not show its objects")
    if request.nproc != 1 and request.command is not None:
        raise UsageError(
            f"--nproc {request.nproc}: a command starts its processes itself",
            "put the launcher into it: --command 'torchrun --nproc-per-node 2 train.py ... {checkpoint} {out}'",
        )

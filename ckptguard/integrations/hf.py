"""A drop-in for `transformers.trainer_utils.get_last_checkpoint`: the checkpoint that `ckptguard preflight` would name.

    from ckptguard.integrations.hf import last_checkpoint

    trainer.train(resume_from_checkpoint=last_checkpoint(training_args.output_dir))

Call it on every rank, as the original: one rank looks, and all get its answer.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ckptguard.decisions import DecisionFailed
from ckptguard.errors import CkptguardError
from ckptguard.gate import Answer, ask
from ckptguard.identity import VARIABLE
from ckptguard.inspect import Options
from ckptguard.model import Evidence

log = logging.getLogger("ckptguard")
LONGEST_LOOK = timedelta(days=1)
"""How long the other ranks wait: as long as reading takes. A rank that dies meanwhile breaks the connection at once."""


class NothingToResumeFrom(CkptguardError):
    """Checkpoints exist, or existed, and none may be resumed from. Starting from scratch would hide that."""

    exit_code = 1


def last_checkpoint(
    folder: str | os.PathLike[str],
    *,
    depth: str = "content",
    allow_lossy: bool = False,
    allow_missing: bool = False,
    max_age: float | None = None,
    jobs: int | None = None,
) -> str | None:
    """The newest checkpoint in `folder` that may be resumed from, or None for a fresh run.

    `max_age`: a recorded verdict so many seconds old is taken (`ckptguard audit --record`). Raises NothingToResumeFrom where checkpoints exist and none is good; TargetNotFound for a folder that does not exist,
    unless `allow_missing`; DecisionFailed on the other ranks where the one that looked failed.
    """
    run = os.fspath(folder)
    options = Options(depth=Evidence(depth), grace=0.0, allow_lossy=allow_lossy, max_age=max_age, jobs=jobs)

    def look(*, alone: bool) -> Answer:
        return ask(run, options, os.environ, alone=alone, allow_missing=allow_missing, keep=False)

    distributed = _process_group()
    if distributed is None:
        answer = look(alone=False)
        decision, checkpoint, reasons = answer.decision, answer.checkpoint, answer.reasons
    else:
        # What `ckptguard run` decided for this start stays decided; without it the ranks need no file to agree.
        decision, checkpoint, reasons = _from_first_rank(
            distributed, lambda: look(alone=VARIABLE not in os.environ)
        )
    for reason in reasons:
        log.warning("%s", reason)
    if decision == "stop":
        raise NothingToResumeFrom(
            f"{run}: no checkpoint of it may be resumed from: {'; '.join(reasons)}", f"ckptguard audit {run}"
        )
    log.info("%s: %s", run, f"resuming from {checkpoint}" if checkpoint else "a fresh run")
    return checkpoint


def _process_group() -> Any:
    """torch.distributed where this process is one of several that are connected already; never imported for it."""
    module = sys.modules.get("torch.distributed")
    if (
        module is None
        or not module.is_available()
        or not module.is_initialized()
        or module.get_world_size() < 2
    ):
        return None
    return module


def _from_first_rank(distributed: Any, look: Callable[[], Answer]) -> tuple[str, str | None, tuple[str, ...]]:
    """What rank 0 found, on every rank. Over a group of its own: a collective of the training's gives up after minutes."""
    group = distributed.new_group(backend="gloo", timeout=LONGEST_LOOK)
    failure: CkptguardError | None = None
    try:
        message: list[Any] = [None]
        if distributed.get_rank() == 0:
            try:
                answer = look()
                message = [("answer", answer.decision, answer.checkpoint, answer.reasons)]
            except CkptguardError as error:
                failure = error
                message = [("failed", error.error_code, error.message, error.hint)]
            except Exception as error:  # noqa: BLE001 - the other ranks must not wait for ever
                failure = CkptguardError(f"unforeseen {type(error).__name__}: {error}")
                failure.__cause__ = error
                message = [("failed", failure.error_code, failure.message, "")]
        distributed.broadcast_object_list(message, src=0, group=group)
    finally:
        distributed.destroy_process_group(group)
    if failure is not None:
        raise failure
    kind, first, second, third = message[0]
    if kind == "failed":
        raise DecisionFailed(first, f"rank 0 could not decide: {second}", third)
    return first, second, third

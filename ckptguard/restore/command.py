"""The user's own training command as a recipe: started, watched through the log that it writes, stopped from outside.

It is not told to end early: a training with fewer steps to go computes another learning-rate schedule.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ckptguard.errors import CkptguardError, RecipeError, StoreError, UsageError
from ckptguard.logs import read_log, read_logs
from ckptguard.model import LogRow, NotRun
from ckptguard.restore.logbook import continuation, training_rows
from ckptguard.restore.model import Fault, Limits, Order, StepNumbers, Trial
from ckptguard.restore.processes import run
from ckptguard.restore.records import directory, recorded_environment
from ckptguard.restore.trials import SILENT_TRACKERS, Progress
from ckptguard.storage.local import LocalStore

LOOK = 0.5
TAIL = 3000
_UNSEEN = (
    NotRun("state", "a command does not show its objects; a Python recipe does"),
    NotRun("rng-draws", "a command does not show its random generators"),
)


class Died(RecipeError):
    """The command ended by itself without having logged one step."""


def command_runner(
    command: str,
    metrics: str | None,
    limits: Limits,
    fallbacks: tuple[tuple[Path, int], ...],
    progress: Progress,
) -> Callable[[Order], Trial]:
    """A function that runs one trial. `fallbacks` are other checkpoints (path, step), to tell whose fault a failure is."""

    def run_once(order: Order) -> Trial:
        try:
            return _run(command, metrics, order, limits, progress)
        except Died as died:
            for path, step in fallbacks[:1]:
                progress(f"the command failed; trying it on {path.name}")
                other = replace(order, checkpoint=str(path), first=step, until=None, steps=1)
                try:
                    _run(command, metrics, other, limits, progress)
                except CkptguardError:
                    raise died from None
                # The same command resumes from another checkpoint of the run: it is this one that it refused.
                return Trial(
                    fault=Fault("restore", f"{died.message} It does resume from {path.name}", died.hint)
                )
            raise

    return run_once


def arguments(command: str, checkpoint: str, out: str, stop: int) -> list[str]:
    """The command's words with the places filled in. Raises UsageError for a command that cannot be split."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--command cannot be split into words: {error}") from None
    if not words:
        raise UsageError("--command is empty")
    places = {"{checkpoint}": checkpoint, "{out}": out, "{stop}": str(stop)}
    filled = []
    for word in words:
        for place, value in places.items():
            word = word.replace(place, value)
        filled.append(word)
    if shutil.which(filled[0]) is None:
        raise UsageError(f"--command: there is no program {filled[0]}")
    return filled


def _run(command: str, metrics: str | None, order: Order, limits: Limits, progress: Progress) -> Trial:
    if order.first is None:
        raise RecipeError(
            "the checkpoint's step is not known, so it cannot be seen when the command has replayed enough",
            "use a Python recipe: --recipe FILE.py:NAME",
        )
    stop = order.first + order.steps
    with tempfile.TemporaryDirectory(prefix="ckptguard-command-") as scratch:
        out = Path(scratch) / "out"
        out.mkdir()
        words = arguments(command, order.checkpoint, str(out), stop)
        watch = _Watch(out, metrics, stop, progress)
        with (Path(scratch) / "output").open("w+b") as output:
            env = {**os.environ, **SILENT_TRACKERS}
            ended = run(words, limits, output=output, env=env, until=watch.reached, look_every=LOOK)
            output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL))
            tail = output.read().decode(errors="replace").strip().splitlines()[-8:]
        rows = watch.rows()
        steps = tuple(_numbers(row) for row in continuation(rows, order.first))
        environment = recorded_environment(None, rows)
    if not steps:
        how = "reached no step" if ended.status in (None, 0) else f"ended with status {ended.status}"
        shown = "".join(f"\n  | {line}" for line in tail)
        where = metrics or "any log"
        raise Died(
            f"the command {how} after step {order.first}: nothing was found in {where} below {{out}}.{shown}",
            "name the log that it writes with --metrics, relative to {out}",
        )
    not_run: tuple[NotRun, ...] = _UNSEEN
    if steps[-1].step < stop:
        not_run = (
            *not_run,
            NotRun("replay", f"the command's log ends at step {steps[-1].step}, asked for {stop}"),
        )
    return Trial(
        environment=environment,
        device=str(environment.get("device", "")),
        steps=tuple(step for step in steps if step.step <= stop),
        not_run=not_run,
        seconds=ended.seconds,
    )


class _Watch:
    """Reads the command's log while it is written."""

    def __init__(self, out: Path, metrics: str | None, stop: int, progress: Progress) -> None:
        self._out = out
        self._metrics = metrics
        self._stop = stop
        self._progress = progress
        self._last = -1

    def rows(self) -> tuple[LogRow, ...]:
        """What is there now; () while there is nothing to read."""
        try:
            if self._metrics is None:
                return read_logs(LocalStore(self._out), directory(self._out))
            path = self._out / self._metrics
            if path.is_dir():
                return read_logs(LocalStore(path), directory(path))
            return read_log(LocalStore(path.parent), path.name) if path.is_file() else ()
        except StoreError:
            return ()

    def reached(self) -> bool:
        last = max((row.step for row in training_rows(self.rows())), default=-1)
        if last > self._last:
            self._last = last
            self._progress(f"the command has logged step {last} of {self._stop}")
        return last >= self._stop


def _numbers(row: LogRow) -> StepNumbers:
    batch = row.extra.get("batch")
    return StepNumbers(
        step=row.step,
        loss=row.loss,
        grad_norm=row.grad_norm,
        lr=row.lr,
        loss_scale=row.loss_scale,
        batch=batch if isinstance(batch, str) else None,
        span=row.span,
    )

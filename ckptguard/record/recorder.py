"""The Recorder: three or four lines in a training loop, and every step and every save can be proven later."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ckptguard.logs.steplog import SCHEMA, StepLogWriter, log_name
from ckptguard.record.batches import FixedBatches, batches_key
from ckptguard.record.consumption import Consumption
from ckptguard.record.environment import environment, launch, rank_and_world, versions
from ckptguard.record.evidence import Evidence, Witness, draft_seal
from ckptguard.record.guard import LOG, Guarded, guarded
from ckptguard.record.housekeeping import forget_batches
from ckptguard.record.loader import WatchedLoader, on_host
from ckptguard.record.pending import PendingRows
from ckptguard.record.replication import Replicator
from ckptguard.record.scalars import plain_ids
from ckptguard.record.sealing import checkpoint_key, write_seal_of
from ckptguard.seals import OURS, Seal
from ckptguard.storage.local import LocalStore


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the recorder itself cost per step, in seconds; what it costs at a save stands in the save's seal."""

    steps: int = 0
    total: float = 0.0
    worst: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.steps if self.steps else 0.0

    def plus(self, seconds: float) -> Overhead:
        return Overhead(self.steps + 1, self.total + seconds, max(self.worst, seconds))


class Recorder(Guarded):
    """Records a training run under `RUN/.ckptguard/`. Make one on every rank, before the first step.

        recorder = Recorder("runs/a", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
        for batch in recorder.watch(loader):
            ...
            recorder.step(step, loss=loss, grad_norm=norm)
            if step % 100 == 0:
                with recorder.save(f"runs/a/step-{step}.pt", step):
                    torch.save(...)

    Nothing it does raises: when it fails it says so once, by the logger `ckptguard.record`, and records no more. At a
    step it never waits for a device. Everything it writes lies under `RUN/.ckptguard/`.

    `parts`: the objects that a checkpoint is made of, by component. `definitions`: what the numbers mean (docs).
    `probe`: returns the loss on one fixed batch; called at each save, in evaluation mode; where it communicates, all
    ranks call it. `generators`: further random generators. `batches`: how many steps after a save are kept whole for a
    replay, 0 for none. `tensors`: whether tensors are hashed in memory at each save. `files`: whether this rank hashes
    the checkpoint's files (default: rank 0). `replicate`: where to copy each checkpoint to. `background`: whether files
    are hashed while the training goes on.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        parts: Mapping[str, Any] | None = None,
        *,
        definitions: Mapping[str, Any] | None = None,
        probe: Callable[[], Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        batches: int = 8,
        batch_bytes: int = 64 << 20,
        tensors: bool = True,
        files: bool | None = None,
        replicate: str | None = None,
        background: bool = True,
    ) -> None:
        self.run = Path(run)
        self.parts: dict[str, Any] = {}
        self.overhead = Overhead()
        self.attempt: int | None = None
        self.last_step = 0
        self._background = background
        self._own = 0.0
        self._last = time.perf_counter()
        self._consumption = Consumption(batches, batch_bytes)
        self._take(parts or {}, generators or {}, probe, tensors=tensors)
        self._open(definitions or {}, files, replicate)

    @guarded
    def _take(
        self,
        parts: Mapping[str, Any],
        generators: Mapping[str, Any],
        probe: Callable[[], Any] | None,
        *,
        tensors: bool,
    ) -> None:
        self.parts = dict(parts)
        self._witness = Witness(self.parts, dict(generators), probe, tensors=tensors)

    @guarded
    def _open(self, definitions: Mapping[str, Any], files: bool | None, replicate: str | None) -> None:
        self.rank, self.world_size = rank_and_world()
        # A definition may be any object (torch.bfloat16); what it is called travels with the checkpoint.
        self.definitions = json.loads(
            json.dumps({"world_size": self.world_size, **definitions}, default=str, skipkeys=True)
        )
        self._with_files = self.rank == 0 if files is None else files
        self._jobs: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckptguard-seal")
        self._log = StepLogWriter(self.run / OURS / log_name(self.rank), self.rank)
        self._rows = PendingRows(self._log)
        self._replicator = Replicator(self.run, replicate) if replicate and self.rank == 0 else None
        self.attempt = self._log.attempt
        about = {
            "definitions": self.definitions,
            "versions": versions(),
            "environment": environment(),
            "launch": launch(),
        }
        self._log.event("start", 0, {"schema": SCHEMA, "time": time.time(), **about})

    # --- steps --------------------------------------------------------------------------------------

    def watch(self, loader: Any) -> WatchedLoader:
        """The loader itself, with each batch noted as it is consumed. It should give out batches on the host.

        Of a loader that accelerate prepared, which moves them itself, the batches before are noted.
        """
        try:
            return WatchedLoader(loader, on_host(loader, self.consumed))
        except Exception as error:  # noqa: BLE001 - the loop gets its loader whatever happens
            self.step_aside("watch", error)
            return WatchedLoader(loader, self.consumed)

    @guarded
    def consumed(self, batch: Any, waited: float = 0.0, known: str | None = None) -> None:
        """Note one (micro-)batch of the coming step; called by `watch`, or by a loop that has no loader.

        `waited` is how long the loop waited for it; `known` its fingerprint, where it was computed already.
        """
        began = time.perf_counter()
        self._consumption.add(batch, waited, known)
        self._own += time.perf_counter() - began

    @guarded
    def step(
        self,
        step: int,
        *,
        loss: Any = None,
        grad_norm: Any = None,
        grad_norm_clipped: Any = None,
        lr: Any = None,
        loss_scale: Any = None,
        skipped: Any = None,
        tokens: Any = None,
        ids: Any = None,
        **more: Any,
    ) -> None:
        """Record one optimizer step after it, counted from 1. Numbers may be tensors on a device: it does not wait.

        `grad_norm` is before clipping. `lr` is the rate that the step used, by default that of the optimizer among the
        parts: call this before `scheduler.step()`. `ids` are sample ids. Further numbers are kept under their names.
        """
        began = time.perf_counter()
        consumed = self._consumption.take(step)
        numbers = {
            "loss": loss,
            "grad_norm": grad_norm,
            "grad_norm_clipped": grad_norm_clipped,
            "lr": self._rate() if lr is None else lr,
            "loss_scale": self._scale() if loss_scale is None else loss_scale,
            "skipped": skipped,
            "tokens": tokens,
            **more,
        }
        values = {
            "batch": consumed.fingerprint,
            "ids": plain_ids(ids),
            "data_time": consumed.waited or None,
            "step_time": began - self._last,
            "time": time.time(),
        }
        self._rows.add(step, numbers, values)
        for fixed in consumed.write:
            self._write_batches(fixed)
        self.last_step, self._last = step, began
        self.overhead = self.overhead.plus(self._own + time.perf_counter() - began)
        self._own = 0.0

    def _rate(self) -> Any:
        groups = getattr(self.parts.get("optimizer"), "param_groups", None)
        return groups[0].get("lr") if groups else None

    def _scale(self) -> Any:
        scaler = self.parts.get("scaler")
        if scaler is None or not getattr(scaler, "is_enabled", lambda: True)():
            return None
        # get_scale() waits for the device; the tensor behind it does not. It is None until the first step.
        scale = getattr(scaler, "_scale", None)
        return getattr(scaler, "_init_scale", None) if scale is None else scale

    @guarded
    def resumed(self, step: int, checkpoint: str | os.PathLike[str] | None = None) -> None:
        """Note that this attempt continues after `step`, from `checkpoint`."""
        self._log.event(
            "resume",
            step,
            {"checkpoint": None if checkpoint is None else str(checkpoint), "time": time.time()},
        )

    @guarded
    def event(self, event: str, step: int, **values: Any) -> None:
        """Note something that happened after a step: an evaluation, a pause, an error. Waits for the device."""
        self._rows.write_all()
        self._log.event(event, step, {"time": time.time(), **values})

    # --- saves --------------------------------------------------------------------------------------

    @contextmanager
    def save(self, checkpoint: str | os.PathLike[str], step: int) -> Iterator[None]:
        """Wrap one save, which is complete when the block ends. What the block raises is raised."""
        evidence = self._look()
        began = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self.event(
                "save-failed", step, checkpoint=str(checkpoint), error=f"{type(error).__name__}: {error}"
            )
            raise
        self._saved(checkpoint, step, evidence or Evidence(), time.perf_counter() - began)

    def saved(self, checkpoint: str | os.PathLike[str], step: int, seconds: float | None = None) -> None:
        """Record a save that a framework has just completed, before anything else is trained or drawn."""
        self._saved(checkpoint, step, self._look() or Evidence(), seconds)

    @guarded
    def _look(self) -> Evidence:
        return self._witness.look()

    @guarded
    def _saved(
        self, checkpoint: str | os.PathLike[str], step: int, evidence: Evidence, seconds: float | None
    ) -> None:
        timings = {"before": evidence.seconds} | ({} if seconds is None else {"save": seconds})
        cost = {"recorder_mean": self.overhead.mean, "recorder_worst": self.overhead.worst}
        try:
            key = checkpoint_key(self.run, checkpoint)
        except ValueError as error:
            self.event("save", step, checkpoint=str(checkpoint), **timings, **cost)
            LOG.warning("ckptguard writes no seal: %s", error)
            return
        self.event("save", step, checkpoint=key, **timings, **cost)
        # What followed an earlier save of that name does not follow this one.
        forget_batches(self.run, key, self.rank)
        keeps = self._consumption.begin(key)
        draft = draft_seal(
            evidence,
            parts=self.parts,
            rank=self.rank,
            world_size=self.world_size,
            checkpoint=key,
            step=step,
            attempt=self.attempt,
            definitions=self.definitions,
            timings=timings,
            batches=batches_key("", key, self.rank) if keeps else None,
        )
        self._later(lambda: self._seal(draft))
        self._last = time.perf_counter()

    # --- in the background --------------------------------------------------------------------------

    def _later(self, work: Callable[[], Any]) -> None:
        if not self._background:
            self._do(work)
            return
        self._jobs = [job for job in self._jobs if not job.done()]
        self._jobs.append(self._pool.submit(self._do, work))

    @guarded
    def _do(self, work: Callable[[], Any]) -> None:
        work()

    def _seal(self, draft: Seal) -> None:
        rank = self.rank if self.world_size > 1 else None
        seal = write_seal_of(self.run, draft, rank, with_files=self._with_files)
        self._log.event(
            "sealed", draft.step or 0, {"checkpoint": draft.checkpoint, "seconds": seal.timings["seal"]}
        )
        self._log.sync()
        if self._replicator is not None:
            self._replicator.put(draft.checkpoint)

    def _write_batches(self, fixed: FixedBatches) -> None:
        store, key = LocalStore(self.run), batches_key("", fixed.checkpoint, self.rank)
        self._later(lambda: self._consumption.try_batches(lambda: store.put(key, fixed.pack())))

    # --- the end ------------------------------------------------------------------------------------

    @guarded
    def flush(self) -> None:
        """Write what waits, and return when every seal so far is written. Waits for the device."""
        self._rows.write_all()
        for job in self._jobs:
            job.result()
        self._log.sync()

    def close(self) -> None:
        """Flush and stop, replication included. A run that is killed before loses nothing but what waits."""
        self._finish()
        self.closed = True
        # Also when it stepped aside before: threads and files are given back.
        pool, log = getattr(self, "_pool", None), getattr(self, "_log", None)
        if pool is not None:
            pool.shutdown()
        if log is not None:
            with suppress(OSError):
                log.close()

    @guarded
    def _finish(self) -> None:
        for fixed in self._consumption.unfinished():
            self._write_batches(fixed)
        self.flush()
        if self._replicator is not None:
            self._replicator.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.event("error", self.last_step, error=f"{type(error).__name__}: {error}")
        self.close()

"""The Recorder under the Hugging Face Trainer: `Trainer(..., callbacks=[RecorderCallback()])`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ckptguard.record.feed import Feed
from ckptguard.record.guard import Guarded, guarded
from ckptguard.record.recorder import Recorder


class RecorderCallback(TrainerCallback, Guarded):
    """Records a Trainer's run under `OUTPUT_DIR/.ckptguard/`; changes nothing of how it trains, saves or rotates.

    Losses and gradient norms are those that the Trainer logs, so `logging_steps=1` makes the strongest log; batches and
    learning rates are recorded at every step. `probe` gets the model and returns a loss; further options are those of
    the Recorder.
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        probe: Callable[[Any], Any] | None = None,
        definitions: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._run, self._probe = run, probe
        self._definitions, self._options = dict(definitions or {}), options
        self.recorder: Recorder | None = None
        self._feed = Feed()
        self._feeding = False
        self._rate: Any = None
        self._micro = 0
        self._row: dict[str, Any] | None = None
        self._logged = 0
        self._moment = time.perf_counter()

    def step_aside(self, what: str, error: Exception) -> None:
        super().step_aside(what, error)
        self._feed.detach()

    # --- the run ------------------------------------------------------------------------------------

    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs.get("model"), kwargs.get("optimizer")
        parts = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": kwargs.get("lr_scheduler"),
            "scaler": getattr(optimizer, "scaler", None),
        }
        options = dict(self._options)
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            # Their optimizers gather from all ranks when asked for their state.
            options.setdefault("tensors", False)
        probe = self._probe
        self.recorder = Recorder(
            self._run or args.output_dir,
            {name: part for name, part in parts.items() if part is not None},
            definitions={**_definitions(args), **self._definitions},
            probe=None if probe is None else lambda: probe(model),
            **options,
        )
        self._logged, self._row, self._micro = state.global_step, None, 0
        if state.global_step:
            self.recorder.resumed(state.global_step)
        self._watch(kwargs.get("train_dataloader"), resumed=state.global_step > 0)
        self._moment = time.perf_counter()

    def _watch(self, loader: Any, *, resumed: bool) -> None:
        if loader is None:
            return
        # Of a stream the Trainer collates again what it skips, and tells nobody how much that was.
        stream = not hasattr(getattr(loader, "dataset", None), "__getitem__")
        self._feeding = not (resumed and stream)
        if self._feeding:
            self._feed.attach(loader)

    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._feed.detach()
        self._write_row()
        if self.recorder is not None:
            self.recorder.close()

    # --- steps --------------------------------------------------------------------------------------

    @guarded
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write_row()
        groups = getattr(kwargs.get("optimizer"), "param_groups", None)
        self._rate = groups[0].get("lr") if groups else None
        self._micro = 0

    @guarded
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro += 1

    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._row = {"step": state.global_step, "lr": self._rate, "epoch": state.epoch}
        if self.recorder is not None and self._feeding:
            for mark, batch in self._feed.take(self._micro + 1):
                self.recorder.consumed(batch, known=mark)
        self._moment = time.perf_counter()

    @guarded
    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if (
            logs is not None
            and "loss" in logs
            and self._row is not None
            and self._row["step"] == state.global_step
        ):
            self._row["loss"] = logs["loss"]
            self._row["grad_norm"] = logs.get("grad_norm")
            self._row["span"] = state.global_step - self._logged
            self._logged = state.global_step
            self._write_row()
        elif logs is not None and self.recorder is not None and any(key.startswith("eval_") for key in logs):
            self._write_row()
            self.recorder.event("evaluate", state.global_step, **logs)
        self._moment = time.perf_counter()

    def _write_row(self) -> None:
        row, self._row = self._row, None
        if row is not None and self.recorder is not None:
            self.recorder.step(**row)

    # --- saves --------------------------------------------------------------------------------------

    @guarded
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self._moment
        self._write_row()
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        # Its own rotation may have removed it already.
        if self.recorder is not None and checkpoint.exists():
            self.recorder.saved(checkpoint, state.global_step, seconds)
        self._moment = time.perf_counter()


def _definitions(args: Any) -> dict[str, Any]:
    """What the Trainer's numbers mean, from its arguments."""
    return {
        "loss": "mean over the steps since the row before",
        "grad_norm": "global, after accumulation, before clipping",
        "clip": args.max_grad_norm,
        "accumulation": args.gradient_accumulation_steps,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "world_size": args.world_size,
        "lr": "used by the step",
    }

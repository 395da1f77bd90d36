"""A function that returns a Hugging Face Trainer: its own train() resumes and replays, with nothing written or published.

The Trainer is asked to resume exactly as a user would, so that what it silently skips is seen. Everything that would
leave the process is switched off; its output directory is a temporary one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptguard.record.fingerprints import OnDevice, fingerprint, join_fingerprints
from ckptguard.restore.held import Held, Refused
from ckptguard.restore.leaves import live_leaves
from ckptguard.restore.loading import Misfit, short
from ckptguard.restore.model import StepNumbers
from ckptguard.restore.session import Session, StateOf, Stop

_OFF = {
    "save_strategy": "no",
    "push_to_hub": False,
    "load_best_model_at_end": False,
    "save_total_limit": None,
    "report_to": [],
    "disable_tqdm": True,
    "hub_model_id": None,
    "torch_empty_cache_steps": None,
}
_LOADERS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_callback_state")
_REPORTING = ("transformers.integrations", "ckptguard.")


@contextmanager
def redirected(scratch: str) -> Iterator[None]:
    """While the user's function makes a Trainer: its output directory is a temporary one, and no repository is created."""
    try:
        from transformers import Trainer
    except ImportError:
        yield  # the recipe will say so where it needs it
        return
    make = Trainer.__init__

    def redirect(self: Any, *positional: Any, **named: Any) -> None:
        args = named.get("args", positional[1] if len(positional) > 1 else None)
        if args is not None:
            args.output_dir = str(Path(scratch) / "output")
            args.push_to_hub = False
        make(self, *positional, **named)

    Trainer.__init__ = redirect  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.__init__ = make  # type: ignore[method-assign]


def run(session: Session, trainer: Any, device: str) -> None:
    """Resume, check, replay. Raises what the training raises; Refused where loading the checkpoint failed."""
    switch_off(trainer, session.order.scratch)
    watch = _Watch(session, trainer)
    session.environment(trainer.args.device.type)
    try:
        trainer.train(resume_from_checkpoint=session.order.checkpoint)
        watch.ended()
    except Stop:
        return
    except Exception as error:
        if watch.loading or _speaks_of(error, session.order.checkpoint):
            kind = Misfit if "loading state_dict" in str(error) else Refused
            raise kind(f"the Trainer does not resume from it: {short(error)}") from error
        raise


def switch_off(trainer: Any, scratch: str) -> None:
    """No saving, publishing or reporting; a temporary output directory. What computes stays as it is."""
    from transformers.trainer_utils import SaveStrategy

    args = trainer.args
    for name, value in _OFF.items():
        setattr(args, name, SaveStrategy.NO if name == "save_strategy" else value)
    args.output_dir = str(Path(scratch) / "output")
    if hasattr(args, "logging_dir"):
        args.logging_dir = str(Path(scratch) / "logs")
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__module__.startswith(_REPORTING):
            trainer.callback_handler.callbacks.remove(callback)
    for name in ("_push_from_checkpoint", "push_to_hub", "create_model_card", "_finish_current_push"):
        if hasattr(trainer, name):
            setattr(trainer, name, lambda *_, **__: None)


class _Watch:
    """Sits inside a Trainer: sees the restored state, the batches, the numbers of each step, and ends the replay."""

    def __init__(self, session: Session, trainer: Any) -> None:
        self.session = session
        self.trainer = trainer
        self.loading = False
        self.batches: list[str] = []
        self.last: int | None = None
        trainer.callback_handler.callbacks.insert(0, self._callback())
        for name in _LOADERS:
            if hasattr(trainer, name):
                self._around(name)
        self._watch_streams()
        self._watch_batches()
        trainer._save_checkpoint = self._at_save

    # --- hooks ----------------------------------------------------------------------------------------------

    def _around(self, name: str) -> None:
        """Know when the Trainer is loading: what is raised then speaks of the checkpoint."""
        inner = getattr(self.trainer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.loading = True
            result = inner(*args, **kwargs)
            self.loading = False
            return result

        setattr(self.trainer, name, call)

    def _watch_streams(self) -> None:
        """The Trainer sets the random generators late, once the skipped batches are read."""
        inner = self.trainer._load_rng_state

        def call(checkpoint: Any) -> Any:
            self.loading = True
            result = inner(checkpoint)
            self.loading = False
            if checkpoint is not None:
                held = self.session.held.streams()
                self.session.report_streams(tuple(held))
            return result

        self.trainer._load_rng_state = call

    def _watch_batches(self) -> None:
        inner = self.trainer.training_step

        def call(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self.batches.append(fingerprint(inputs))
            except OnDevice:
                self.batches.append(fingerprint(_to_host(inputs)))
            return inner(model, inputs, *args, **kwargs)

        self.trainer.training_step = call

    def _callback(self) -> Any:
        from transformers import TrainerCallback

        watch = self

        class Watch(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                watch._restored(state)

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                control.should_log = True
                # The moment of a save is after the evaluation, which draws random numbers too.
                control.should_save = state.global_step == watch.session.order.until
                return control

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                watch._logged(state.global_step, logs or {})

            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if watch.last is not None and state.global_step >= watch.last:
                    raise Stop

        return Watch()

    # --- what they see ----------------------------------------------------------------------------------------

    def _restored(self, state: Any) -> None:
        self.session.note("loaded")
        order = self.session.order
        first = order.first if order.first is not None else state.global_step
        if state.global_step != first:
            self.session.not_run(
                "step", f"the Trainer resumes at step {state.global_step}, the checkpoint is of {first}"
            )
        wanted = max(state.global_step + order.steps, order.until or 0)
        self.last = min(wanted, state.max_steps)
        self.session.check_state(self._states())
        if self.last == state.global_step:
            self.session.not_run("replay", f"the training ends at this step (max_steps = {state.max_steps})")
            raise Stop

    def _states(self) -> dict[str, StateOf]:
        trainer = self.trainer
        states: dict[str, StateOf] = {"model": self._model_state}
        if trainer.optimizer is not None:
            states["optimizer"] = trainer.optimizer.state_dict
        if trainer.lr_scheduler is not None:
            states["scheduler"] = trainer.lr_scheduler.state_dict
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            states["scaler"] = scaler.state_dict
        return states

    def _model_state(self) -> Any:
        """The weights under the names that the Trainer saves them by."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if hasattr(model, "peft_config"):
            from peft import get_peft_model_state_dict

            return get_peft_model_state_dict(model)
        state = model.state_dict()
        held = self.session.held
        if "model" not in held.places:
            return state
        saved = {".".join(path) for path in held.leaves("model")}
        live = {".".join(path): leaf for path, leaf in live_leaves(state).items()}
        kept = {live[name].memory for name in saved if name in live}
        strangers = [name for name, leaf in live.items() if name not in saved and leaf.memory not in kept]
        if saved <= live.keys() and not strangers:
            return state
        # The library renames some weights when it saves: save again, and compare what both files hold.
        again = Path(self.session.order.scratch) / "saved-again"
        model.save_pretrained(again)
        resaved = Held(str(again))
        return resaved.loaded("model")

    def _logged(self, step: int, logs: dict[str, Any]) -> None:
        if "loss" not in logs:
            return
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        self.session.step(
            StepNumbers(
                step=step,
                loss=float(logs["loss"]),
                grad_norm=float(logs["grad_norm"]) if logs.get("grad_norm") is not None else None,
                lr=float(logs["learning_rate"]) if logs.get("learning_rate") is not None else None,
                loss_scale=float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None,
                batch=join_fingerprints(self.batches),
            )
        )
        self.batches.clear()
        until = self.session.order.until
        if self.last is not None and step >= self.last and (until is None or step > until):
            raise Stop

    def _at_save(self, *_: Any, **__: Any) -> None:
        """In place of a save: the whole state is what the Trainer would save now."""
        order = self.session.order
        if order.against is None or self.trainer.state.global_step != order.until:
            return
        self.session.check_against(self._states())
        if self.last is not None and self.trainer.state.global_step >= self.last:
            raise Stop

    def ended(self) -> None:
        """The training ended by itself."""
        self.session.not_run("replay", f"the training ended at step {self.trainer.state.global_step}")


def _speaks_of(error: BaseException, checkpoint: str) -> bool:
    """Whether the error names a file of the checkpoint: then the file, not the user's code, is what is missing."""
    name = getattr(error, "filename", None)
    return name is not None and Path(str(name)).is_relative_to(checkpoint)


def _to_host(inputs: Any) -> Any:
    if isinstance(inputs, dict) or hasattr(inputs, "items"):
        return {key: _to_host(value) for key, value in inputs.items()}
    return inputs.detach().cpu() if hasattr(inputs, "detach") else inputs

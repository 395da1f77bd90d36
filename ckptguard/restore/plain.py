"""A recipe of a few lines of Python: build(device), step(parts), and where it wants load, probe, step_on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptguard.errors import FormatError, RecipeError
from ckptguard.record.batches import StepBatches, unpack
from ckptguard.record.fingerprints import fingerprint, join_fingerprints
from ckptguard.record.probe import run_probe
from ckptguard.restore.components import canonical
from ckptguard.restore.held import Held
from ckptguard.restore.loading import LoadRaised, load_parts, named_state, short
from ckptguard.restore.model import StepNumbers
from ckptguard.restore.session import Session, StateOf

_LR = ("lr", "learning_rate")
_NORM = ("grad_norm", "gradient_norm")


def run(session: Session, recipe: Any, device: str) -> None:
    """Build, load, check, replay. Raises what the user's code raises; Refused where the checkpoint is to blame."""
    parts = recipe.build(device)
    if not isinstance(parts, Mapping) or not parts:
        raise RecipeError(
            f"build() returned {type(parts).__name__}; expected a dict of parts, such as {{'model': model}}"
        )
    session.environment(device)
    own = callable(getattr(recipe, "load", None))
    if own:
        try:
            recipe.load(parts, session.order.checkpoint)
        except Exception as error:
            raise LoadRaised(f"the recipe's load() raised {short(error)}") from error
    elif not session.held.places:
        raise RecipeError(
            f"how a checkpoint of the layout {session.order.layout} is loaded into parts is not known",
            "give the recipe a load(parts, checkpoint), or validate the training command: --command '...'",
        )
    else:
        load_parts(parts, session.held)
    states = _states(parts, session.held)
    session.note("loaded")
    session.check_state(states, own_names=own)
    if callable(getattr(recipe, "probe", None)):
        session.note("probe", loss=run_probe(lambda: _loss_of_probe(recipe, parts), _modules(parts)))
    session.restore_streams()
    _replay(session, recipe, parts, states)


def _states(parts: Mapping[str, Any], held: Held) -> dict[str, StateOf]:
    states = {n: part.state_dict for n, part in parts.items() if callable(getattr(part, "state_dict", None))}
    form = held.optimizer_form
    if form != "numbered":
        states |= {n: partial(named_state, parts, n, form) for n in states if canonical(n) == "optimizer"}
    return states


def _loss_of_probe(recipe: Any, parts: Mapping[str, Any]) -> float:
    loss = _number("loss", recipe.probe(parts), "probe()")
    if loss is None:
        raise RecipeError("probe() returned None; expected one number, the loss")
    return loss


def _modules(parts: Mapping[str, Any]) -> list[Any]:
    import torch

    return [part for part in parts.values() if isinstance(part, torch.nn.Module)]


def _replay(session: Session, recipe: Any, parts: Mapping[str, Any], states: Mapping[str, StateOf]) -> None:
    order = session.order
    first = order.first or 0
    fixed: dict[int, StepBatches] = {}
    if not callable(getattr(recipe, "step", None)):
        fixed = _fixed_batches(order.batches)
        if not fixed:
            session.not_run("replay", "the recipe has no step(), and no batches were recorded for step_on()")
            return
        session.note("fixed_batches")
    for step in range(first + 1, (session.last_step or order.steps) + 1):
        if fixed:
            if step not in fixed:
                session.not_run("replay", f"batches were recorded up to step {step - 1} only")
                return
            result = recipe.step_on(parts, list(fixed[step].micro_batches))
            numbers = replace(read_numbers(step, result), batch=None)
        else:
            numbers = read_numbers(step, recipe.step(parts))
        session.step(numbers)
        if step == order.until:
            session.check_against(states)


def _fixed_batches(path: str | None) -> dict[int, StepBatches]:
    if path is None or not Path(path).is_file():
        return {}
    try:
        return {kept.step: kept for kept in unpack(Path(path).read_bytes(), path)}
    except FormatError as error:
        raise RecipeError(
            error.args[0], "remove the file of recorded batches, or give the recipe a step()"
        ) from error


def read_numbers(step: int, result: Any) -> StepNumbers:
    """The numbers that step() returned. Raises RecipeError for anything but a dict with a loss."""
    if not isinstance(result, Mapping) or result.get("loss") is None:
        shown = (
            f"a dict with {sorted(map(str, result))}"
            if isinstance(result, Mapping)
            else type(result).__name__
        )
        raise RecipeError(f"step() returned {shown}; expected a dict with at least 'loss'")
    return StepNumbers(
        step=int(_number("step", result.get("step", step)) or step),
        loss=_number("loss", result.get("loss")),
        grad_norm=_number("grad_norm", _first(result, _NORM)),
        lr=_number("lr", _first(result, _LR)),
        loss_scale=_number("loss_scale", result.get("loss_scale")),
        batch=batch_fingerprint(result.get("batch")),
    )


def _first(result: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((result[name] for name in names if result.get(name) is not None), None)


def _number(name: str, value: Any, where: str = "step()") -> float | None:
    if isinstance(value, list | tuple) and value:  # get_last_lr() gives one rate a group
        value = value[0]
    if value is None:
        return None
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise RecipeError(f"{where} returned {type(value).__name__} as {name}; expected one number") from None


def batch_fingerprint(batch: Any) -> str | None:
    """What a batch is compared by: the text that the recipe gives, or the fingerprint of the batch itself."""
    if batch is None or isinstance(batch, str):
        return batch
    try:
        if hasattr(batch, "__next__"):
            return join_fingerprints(fingerprint(on_host(micro)) for micro in batch)
        return fingerprint(on_host(batch))
    except TypeError:
        return None  # of a class that nothing can be read of: the recorder had no fingerprint of it either


def on_host(batch: Any) -> Any:
    """The batch with its tensors in host memory, where fingerprints are taken."""
    if hasattr(batch, "detach"):
        return batch.detach().cpu()
    if isinstance(batch, Mapping):
        return {key: on_host(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [on_host(value) for value in batch]
    if is_dataclass(batch) and not isinstance(batch, type):
        return {one.name: on_host(getattr(batch, one.name)) for one in fields(batch)}
    return batch

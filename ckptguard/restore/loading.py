"""How a checkpoint is loaded into parts when the recipe does not say: each part takes the component of its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptguard.restore.components import canonical, renames
from ckptguard.restore.held import Held, Refused


class Misfit(Refused):
    """The model's names or shapes are not those of the checkpoint: one of the two is to blame, which others decide."""


class LoadRaised(Refused):
    """The recipe's own load() raised: its fault, or the checkpoint's, which others decide."""


def load_parts(parts: Mapping[str, Any], held: Held) -> None:
    """Call load_state_dict of every part for which the checkpoint holds a component. Raises Refused, Misfit.

    A part without a counterpart stays as built: the comparison of states reports it.
    """
    loadable = {
        name: part for name, part in parts.items() if callable(getattr(part, "load_state_dict", None))
    }
    # A model first: optimizers and averages refer to its parameters.
    for name in sorted(loadable, key=lambda name: canonical(name) != "model"):
        component = canonical(name)
        if component not in held.places:
            continue
        state = held.loaded(component)
        subject = ", ".join(held.places[component].files[:2])
        try:
            if component == "optimizer" and held.optimizer_form != "numbered":
                _load_named(parts, name, state, held.optimizer_form)
            else:
                _load(component, loadable[name], state)
        except Refused:
            raise
        except Exception as error:
            kind = Misfit if component == "model" else Refused
            raise kind(f"{subject}: {name} refuses its state: {short(error)}") from error
    held.release()


def _load(component: str, part: Any, state: Any) -> None:
    if component in ("model", "ema") and isinstance(state, Mapping):
        live = part.state_dict()
        names = renames(map(str, state), map(str, live))
        if names:
            state = {names[key]: value for key, value in state.items()}
        elif _lacks_only_tied(part, state, live):
            # Tied weights are saved once; loading them once loads both.
            part.load_state_dict(state, strict=False)
            return
    part.load_state_dict(state)


def _model_of(parts: Mapping[str, Any]) -> Any:
    model = next((part for name, part in parts.items() if canonical(name) == "model"), None)
    if model is None:
        raise Refused(
            "the optimizer's state is kept by names of parameters, and the recipe has no part model"
        )
    return model


def _load_named(parts: Mapping[str, Any], name: str, state: Any, form: str) -> None:
    """Load an optimizer's state that is kept by the parameters' names, as `get_state_dict` of torch saves it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    set_optimizer_state_dict(_model_of(parts), parts[name], optim_state_dict=state, options=options)


def named_state(parts: Mapping[str, Any], name: str, form: str) -> Any:
    """An optimizer's state by the parameters' names."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    return get_optimizer_state_dict(_model_of(parts), parts[name], options=options)


def _lacks_only_tied(part: Any, state: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether the file holds all weights of the model but those that share memory with one that it does hold."""
    missing = live.keys() - state.keys()
    if not missing or state.keys() - live.keys():
        return False
    held = {live[name].data_ptr() for name in state if hasattr(live[name], "data_ptr")}
    return all(hasattr(live[name], "data_ptr") and live[name].data_ptr() in held for name in missing)


def short(error: Exception, lines: int = 4) -> str:
    """The kind of an error and its first lines, as one line."""
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    more = f" (and {len(text) - lines} more)" if len(text) > lines else ""
    return f"{type(error).__name__}: {' '.join(text[:lines])}{more}"

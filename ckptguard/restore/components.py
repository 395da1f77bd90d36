"""Which key of a checkpoint's content, or which of its files, holds which component. Pure: names only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Path = tuple[str | int, ...]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALIASES: Mapping[str, frozenset[str]] = {
    "model": _names(
        "model net network module weights params parameters generator pytorch_model adapter_model policy actor"
    ),
    "optimizer": _names("optimizer optim opt optimizers"),
    "scheduler": _names(
        "scheduler lr_scheduler lr_sched sched schedulers lr_schedulers learning_rate_scheduler"
    ),
    "scaler": _names("scaler grad_scaler gradscaler amp amp_scaler loss_scaler mixedprecision"),
    "dataloader": _names(
        "dataloader loader data_loader train_loader train_dataloader data dl sampler dataset data_state"
    ),
    "ema": _names("ema ema_model model_ema ema_params ema_weights averaged_model swa"),
    "rng": _names("rng random rngs random_states seeds rng_states random_generators"),
}
_KNOWN = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
# What one of several is called by: opt_g is optimizer_g.
_SHORT = {
    alias: name
    for name in ("optimizer", "scheduler", "scaler")
    for alias in ALIASES[name]
    if "_" not in alias
}
_FORMS: Mapping[str, frozenset[str]] = {
    "optimizer": frozenset(("state", "param_groups")),
    "scheduler": frozenset(("last_epoch", "_step_count")),
    "scaler": frozenset(("scale", "growth_factor")),
}
_SUFFIX = re.compile(r"_(?:state_dicts?|states?|dict|sd)$")
_NUMBER = re.compile(r"_?(\d+)$")
_WRAPPERS = ("state", "states", "train_state", "training_state", "checkpoint", "ckpt", "app")


def canonical(name: str) -> str:
    """The component that a key, a file's stem or a recipe's part stands for; the plain name where it is none."""
    plain = name.lower().replace("-", "_").replace(" ", "_")
    if plain in ("state_dict", "model_state_dict"):
        return "model"
    while (shorter := _SUFFIX.sub("", plain)) != plain and shorter:
        plain = shorter
    return _KNOWN.get(plain) or "_".join(_SHORT.get(word, word) for word in plain.split("_"))


def form_of(name: str, tree: Any) -> str:
    """What a component is: by its name, else by the form of its content; "" where neither says."""
    if name in ALIASES:
        return name
    keys = tree.keys() if isinstance(tree, Mapping) else frozenset()
    return next((form for form, wanted in _FORMS.items() if wanted <= keys), "")


def components_of(tree: Any) -> dict[str, Path]:
    """The path to each component of a file's content. Bare weights (tensors by name) are the model at the path ()."""
    if not isinstance(tree, Mapping):
        return {}
    found: dict[str, Path] = {}
    for key, value in tree.items():
        if isinstance(key, str) and isinstance(value, Mapping | list | tuple):
            _add(found, key, value, ())
    for key in tree:
        if isinstance(key, str) and key.lower() in _WRAPPERS and isinstance(tree[key], Mapping):
            for inner, value in tree[key].items():
                if isinstance(inner, str) and isinstance(value, Mapping | list | tuple):
                    _add(found, inner, value, (key,))
    if not found.keys() & ALIASES.keys() and tree and all(_is_tensor(v) for v in tree.values()):
        return {"model": ()}
    return found


def _add(found: dict[str, Path], key: str, value: Any, above: Path) -> None:
    name = canonical(key)
    if isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
        for at in range(len(value)):
            found.setdefault(name if at == 0 else f"{name}_{at}", (*above, key, at))
    else:
        found.setdefault(name, (*above, key))


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def pick(tree: Any, path: Path) -> Any:
    """What lies at a path."""
    for key in path:
        tree = tree[key]
    return tree


def without(tree: Any, paths: Iterable[Path]) -> Any:
    """The tree less what lies at these paths, so that one can look for things elsewhere."""
    if not isinstance(tree, Mapping):
        return {}
    paths = list(paths)
    gone = {path[0] for path in paths if len(path) == 1}
    rest = {key: value for key, value in tree.items() if key not in gone}
    for head in {path[0] for path in paths if len(path) > 1} & rest.keys():
        rest[head] = without(rest[head], [path[1:] for path in paths if path[0] == head and len(path) > 1])
    return rest


def component_of_file(name: str) -> str | None:
    """The component that a file of a checkpoint directory holds, by its name; None where the name does not say."""
    stem, dot, extension = name.rpartition(".")
    if not dot or extension not in ("pt", "pth", "bin", "ckpt", "safetensors", "pkl"):
        return None
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", stem)
    match = _NUMBER.search(stem)
    base = stem[: match.start()] if match else stem
    component = canonical(base)
    if component == "rng" or base == "random_states":
        return "rng"
    if component == "dl" or component not in ALIASES:
        return None
    return f"{component}_{match[1]}" if match and int(match[1]) else component


# --- names of weights -------------------------------------------------------------------------------------

_WRAPPER_SEGMENTS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


def unwrapped(name: str) -> str:
    """A weight's name without what DDP, FSDP and torch.compile put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)


def renames(saved: Iterable[str], live: Iterable[str]) -> dict[str, str] | None:
    """From saved to live names, where they differ by wrappers only; {} where they are equal, None where they differ more."""
    saved, live = list(saved), list(live)
    if set(saved) == set(live):
        return {}
    by_plain = {unwrapped(name): name for name in live}
    if len(by_plain) != len(live) or {unwrapped(name) for name in saved} != by_plain.keys():
        return None
    return {name: by_plain[unwrapped(name)] for name in saved}

"""Finds the user's recipe and tells which kind it is. Runs in the child process: it is the user's own code."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ckptguard.errors import RecipeError

Making = Callable[[ModuleType], AbstractContextManager[None]]
EXAMPLE = "an object with build(device) and step(parts), or a function that returns a Trainer"


@dataclass(frozen=True, slots=True)
class Found:
    """`kind`: plain (build and step), trainer (Hugging Face), lightning (Trainer, module, data)."""

    kind: str
    recipe: Any


def split_spec(spec: str) -> tuple[str, str]:
    """(file or module, name) of FILE.py:NAME or MODULE:NAME; the name may be left out for a module that is a recipe."""
    where, colon, name = spec.rpartition(":")
    if not colon:
        where, name = spec, ""
    if not where or any(part and not part.isidentifier() for part in name.split(".")):
        raise RecipeError(f"{spec}: not a recipe; expected FILE.py:NAME or MODULE:NAME")
    return where, name


def find_recipe(spec: str, making: Making = lambda module: nullcontext()) -> Found:
    """Import, find, and where it is a class or function make the recipe.

    `making` gives what the making happens in. Raises RecipeError, and what the user's code raises.
    """
    where, name = split_spec(spec)
    module = _import(where)
    target: Any = module
    for part in filter(None, name.split(".")):
        if not hasattr(target, part):
            raise RecipeError(f"{spec}: there is no {part} in {where}; {_offers(target)}")
        target = getattr(target, part)
    if not name and not _is_plain(target):
        raise RecipeError(f"{spec}: which name in it? {_offers(target)}", f"--recipe {where}:NAME")
    if inspect.isclass(target) or (callable(target) and not _is_plain(target)):
        with making(module):
            target = _make(spec, target)
    return Found(_kind(spec, target), target)


def _import(where: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is not None and where.split(".")[0] == error.name.split(".")[0]:
                raise RecipeError(
                    f"there is no module {where}", "give FILE.py:NAME, or set PYTHONPATH"
                ) from None
            raise
    path = Path(where)
    if not path.is_file():
        raise RecipeError(f"{where}: no such file")
    # As when it is started as a script: its neighbours can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # a file that ends with .py has a loader
    module = importlib.util.module_from_spec(spec)
    # Loader workers and pickled functions look it up by name. A library's name stays the library's.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _make(spec: str, target: Any) -> Any:
    """Call a class or function that needs no arguments."""
    try:
        required = [
            p.name
            for p in inspect.signature(target).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):
        required = []
    if required:
        raise RecipeError(
            f"{spec}: it needs the arguments {', '.join(required)}; a recipe is made without any"
        )
    return target()


def _is_plain(value: Any) -> bool:
    return callable(getattr(value, "build", None)) and any(
        callable(getattr(value, step, None)) for step in ("step", "step_on")
    )


def _kind(spec: str, value: Any) -> str:
    if _is_plain(value):
        return "plain"
    if _descends(value, "transformers.trainer", "Trainer"):
        return "trainer"
    if isinstance(value, tuple) and value and _is_lightning(value[0]):
        if len(value) in (2, 3):
            return "lightning"
        raise RecipeError(f"{spec}: returned {len(value)} things; expected (Trainer, module, data)")
    raise RecipeError(f"{spec}: a {type(value).__name__} is no recipe; expected {EXAMPLE}")


def _is_lightning(value: Any) -> bool:
    return any(
        _descends(value, f"{package}.trainer.trainer", "Trainer")
        for package in ("lightning.pytorch", "pytorch_lightning")
    )


def _descends(value: Any, module: str, name: str) -> bool:
    """Whether it is an instance of a library's class, without importing that library."""
    return any(cls.__module__ == module and cls.__name__ == name for cls in type(value).__mro__)


def _offers(target: Any) -> str:
    names = [
        name
        for name, value in vars(target).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value) or _is_plain(value))
        and getattr(value, "__module__", target.__name__ if inspect.ismodule(target) else "")
        in (getattr(target, "__name__", ""), "__main__")
    ]
    return f"it has {', '.join(sorted(names))}" if names else f"expected {EXAMPLE}"

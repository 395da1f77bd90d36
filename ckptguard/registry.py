"""Finds the plug-ins: built-ins by their folder, other people's by entry point. Nothing registers itself on import."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import Any, cast

from ckptguard.ports import Check, Layout, RunCheck


def _found(package: str, attribute: str, group: str) -> list[Any]:
    module = importlib.import_module(package)
    found = []
    for info in sorted(pkgutil.iter_modules(module.__path__), key=lambda i: i.name):
        if not info.name.startswith("_"):
            plugin = getattr(importlib.import_module(f"{package}.{info.name}"), attribute, None)
            if plugin is not None:
                found.append(plugin)
    found += [point.load() for point in entry_points(group=group)]
    return found


@cache
def layouts() -> tuple[Layout, ...]:
    """All layouts, in the order in which they are asked."""
    return tuple(
        sorted(
            cast("list[Layout]", _found("ckptguard.layouts", "LAYOUT", "ckptguard.layouts")),
            key=lambda layout: layout.order,
        )
    )


@cache
def checks() -> tuple[Check, ...]:
    """All checks of a checkpoint."""
    return tuple(_found("ckptguard.validators", "CHECK", "ckptguard.checks"))


@cache
def run_checks() -> tuple[RunCheck, ...]:
    """All checks of a run."""
    return tuple(_found("ckptguard.validators", "RUN_CHECK", "ckptguard.run_checks"))


def layout_named(name: str) -> Layout | None:
    return next((layout for layout in layouts() if layout.name == name), None)

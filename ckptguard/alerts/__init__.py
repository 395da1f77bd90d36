"""Where alerts go: one sink a file. A new sink is a new file with `claims(spec)` and `open_sink(spec)`."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from ckptguard.errors import UsageError
from ckptguard.ports import AlertSink

__all__ = ["open_sink"]


def open_sink(spec: str) -> AlertSink:
    """The sink that a specification names. Raises UsageError, or MissingExtra when its package is not installed."""
    for module in _sinks():
        if module.claims(spec):
            sink: AlertSink = module.open_sink(spec)
            return sink
    # The specification may be a secret, so it is not repeated.
    raise UsageError(
        "an alert sink cannot be understood",
        "give file:PATH, stderr, http(s)://..., alertmanager:URL, or any Apprise URL",
    )


def _sinks() -> list[ModuleType]:
    """Every sink, the one that claims the rest last."""
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return sorted(modules, key=lambda m: (getattr(m, "LAST", False), m.__name__))

"""Keeps a failing recorder from killing the training: it says so once and steps aside."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

LOG = logging.getLogger("ckptguard.record")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Guarded:
    """What a class of guarded methods has. `aside` is the error that made it give up; `closed` that it is done."""

    aside: Exception | None = None
    closed: bool = False

    def step_aside(self, what: str, error: Exception) -> None:
        """Give up recording, once and for all; the training goes on."""
        if self.aside is None:
            self.aside = error
            LOG.warning("ckptguard stops recording, the training goes on: %s failed", what, exc_info=error)


def guarded(method: F) -> F:
    """A method that never raises: it returns None when it failed, and always from then on."""

    @functools.wraps(method)
    def call(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        if self.aside is not None or self.closed:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here is less than the training
            self.step_aside(method.__name__, error)
            return None

    return cast(F, call)


class Once:
    """Something optional that is switched off when it fails for the first time: the rest goes on without it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.off = False

    def __call__(self, work: Callable[[], T]) -> T | None:
        """What `work` returns, or None when it failed now or earlier."""
        if self.off:
            return None
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - optional evidence is worth no crash
            self.off = True
            LOG.warning("ckptguard goes on without %s: %s: %s", self.what, type(error).__name__, error)
            return None

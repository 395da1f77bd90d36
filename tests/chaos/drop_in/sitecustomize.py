"""Puts our drop-in where the Trainer looks for its last checkpoint: the one line that a user would write, from outside."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TRAINER = "transformers.trainer"


class _DropIn(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.asking = False

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != TRAINER or self.asking:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking = False
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            from ckptguard.integrations.hf import last_checkpoint

            load(module)
            module.get_last_checkpoint = last_checkpoint  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _DropIn())

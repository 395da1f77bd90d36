"""What several files here share: the small loop of test_plain_loops, and the wish that a run be silent."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

LOOPS = Path(__file__).parent / "test_plain_loops.py"


@pytest.fixture(scope="session")
def plain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_loops", LOOPS)
    assert spec is not None and spec.loader is not None
    module = sys.modules["plain_loops"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

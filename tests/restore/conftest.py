"""Real runs, made once a module, and a way to run trials without a child process where the process is not the subject."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ckptguard.restore import validation
from ckptguard.restore.model import Limits, Order, RestoreReport, Trial
from ckptguard.restore.trials import Progress, fold, read_events, settle
from ckptguard.restore.worker import perform

RECIPES = Path(__file__).parent / "recipes"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="session")
def recipe() -> Callable[[str], str]:
    """The full name of a recipe in recipes/: `recipe("plain_loop:Loop")`."""

    def full(name: str) -> str:
        file, _, attribute = name.partition(":")
        return f"{RECIPES / file}.py:{attribute}"

    return full


@pytest.fixture(scope="session")
def logged_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain loop of 24 steps with a checkpoint every 6 and nothing but its own metrics.jsonl."""
    run = tmp_path_factory.mktemp("logged") / "run"
    module("plain_loop").train(run, steps=24, every=6)
    return run


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same under the Recorder."""
    run = tmp_path_factory.mktemp("recorded") / "run"
    module("plain_loop").record(run, steps=24, every=6)
    return run


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a run that a test may damage, times kept."""
    numbers = itertools.count()

    def make(run: Path) -> Path:
        return Path(shutil.copytree(run, tmp_path / f"copy-{next(numbers)}"))

    return make


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., RestoreReport]]:
    """`here(checkpoint, recipe, **request)`: the whole restore, with the trials in this process instead of children."""
    numbers = itertools.count()

    def run_trial(order: Order, limits: Limits, progress: Progress = lambda text: None) -> Trial:
        scratch = tmp_path / f"trial-{next(numbers)}"
        scratch.mkdir()
        status = perform(validation.replace(order, scratch=str(scratch)), scratch / "events.jsonl")
        return settle(fold(read_events(scratch / "events.jsonl")), status)

    monkeypatch.setattr(validation, "run_trial", run_trial)

    def restore(checkpoint: Path, recipe: str, **options: object) -> RestoreReport:
        request = validation.Request(checkpoint=str(checkpoint), recipe=recipe, **options)  # type: ignore[arg-type]
        return validation.validate(request)

    yield restore

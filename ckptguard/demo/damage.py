"""Five ways in which checkpoints go bad, each made in a copy of the run. The first two are a disk's, three are a bug's."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptguard.seals import OURS


@dataclass(frozen=True, slots=True)
class Damage:
    """`make(run, newest, previous)` damages the newest checkpoint of a copy. `seen_by` is what finds it: audit, restore."""

    name: str
    what: str
    make: Callable[[Path, Path, Path], None]
    seen_by: str = "audit"


def copy_run(run: Path, to: Path, checkpoints: list[Path]) -> None:
    """Some checkpoints of a run with all that was recorded of it, times included."""
    to.mkdir(parents=True)
    shutil.copytree(run / OURS, to / OURS)
    for checkpoint in checkpoints:
        shutil.copy2(checkpoint, to / checkpoint.name)


def _flip_bit(run: Path, newest: Path, previous: Path) -> None:
    before = newest.stat()
    with newest.open("r+b") as file:
        # Well inside the weights: the middle of the file is tensor data.
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    # A disk that rots does not touch the time.
    os.utime(newest, ns=(before.st_atime_ns, before.st_mtime_ns))


def _truncate(run: Path, newest: Path, previous: Path) -> None:
    os.truncate(newest, newest.stat().st_size // 3 * 2)


def _rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    import torch

    # Our own file, written a moment ago.
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def _drop_optimizer(run: Path, newest: Path, previous: Path) -> None:
    _rewrite(newest, lambda state: state.pop("optimizer"))


def _other_scheduler(run: Path, newest: Path, previous: Path) -> None:
    import torch

    older = torch.load(previous, weights_only=False)
    _rewrite(newest, lambda state: state.update(scheduler=older["scheduler"]))


def _skip_batch(run: Path, newest: Path, previous: Path) -> None:
    def advance(state: dict[str, Any]) -> None:
        state["dataloader"]["position"] += 1

    _rewrite(newest, advance)


DAMAGES = (
    Damage("flipped-bit", "one bit flipped in the middle of the file, as a failing disk does", _flip_bit),
    Damage("truncated", "the last third of the file cut off, as a full disk does", _truncate),
    Damage("no-optimizer", "saved without the optimizer, as a wrong flag does", _drop_optimizer),
    Damage("other-scheduler", "saved with the scheduler of an earlier step", _other_scheduler),
    Damage("skipped-batch", "saved with the data loader one batch too far", _skip_batch, seen_by="restore"),
)


def what_torch_says(checkpoint: Path) -> str:
    """What loading the file as every training script does would have said."""
    import torch

    try:
        torch.load(checkpoint, weights_only=False)
    except Exception as error:  # noqa: BLE001 - whatever it says is what we show
        return textwrap.shorten(f"{type(error).__name__}: {error}", 100)
    return "loaded without a word"

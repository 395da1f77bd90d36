"""Keeps what the recorder leaves behind bounded: fixed batches live no longer than their checkpoint."""

from __future__ import annotations

from pathlib import Path

from ckptguard.record.batches import FOLDER, batches_key

_SUFFIX = ".safetensors"


def forget_batches(run: Path, checkpoint: str, rank: int) -> None:
    """Remove the fixed batches of an earlier save of this name, and those of checkpoints that were rotated away.

    Seals stay: they are how a later look knows that a checkpoint once was here.
    """
    run.joinpath(batches_key("", checkpoint, rank)).unlink(missing_ok=True)
    folder = run / FOLDER
    for file in folder.rglob(f"*{_SUFFIX}") if folder.is_dir() else ():
        name = file.relative_to(folder).as_posix().removesuffix(_SUFFIX)
        owner, _, last = name.rpartition("/")
        if last.startswith("rank-") and last.removeprefix("rank-").isdecimal():
            name = owner
        if not run.joinpath(name).exists():
            file.unlink(missing_ok=True)

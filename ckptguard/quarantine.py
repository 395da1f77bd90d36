"""Moves unsafe checkpoints out of a framework's sight, under RUN/.ckptguard/quarantine/, and back.

Renaming in place would not do: torchtitan finds steps by searching names for `step-N`, so `step-30.bad` still counts.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptguard.errors import Refused, StoreError
from ckptguard.model import Effect, Manifest, Pointer, Resume, Verdict

FOLDER = Path(".ckptguard") / "quarantine"
RECORD = "moved.json"
SETTLED = 900.0  # seconds without a change before a checkpoint may be moved: a save may still be going on


@dataclass(frozen=True, slots=True)
class Move:
    """One checkpoint's way: `files` are (from, to) relative to the run, `pointers` (file, old text, new text)."""

    checkpoint: str
    files: tuple[tuple[str, str], ...]
    pointers: tuple[tuple[str, str, str | None], ...]
    why: str


def plan_moves(
    manifests: Sequence[Manifest],
    verdicts: dict[str, Verdict],
    pointers: Sequence[Pointer],
    good: str | None,
    now: float,
    run: str = "",
) -> list[Move]:
    """What to move: unsafe checkpoints that did not change lately. Pure.

    `verdicts` by manifest path. `good` is the checkpoint that pointers which named a moved one shall name, if any.
    Raises Refused for one that was changed within the last quarter of an hour.
    """
    moves = []
    for manifest in manifests:
        verdict = verdicts.get(manifest.path)
        if verdict is None or verdict.resume is not Resume.UNSAFE:
            continue
        if now - manifest.modified < SETTLED:
            raise Refused(
                f"{manifest.path} was changed {now - manifest.modified:.0f} seconds ago: it may still be being written",
                f"wait until it is {SETTLED:.0f} seconds old, or stop the training first",
            )
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        tops = _tops(manifest)
        files = tuple((top, str(FOLDER / f"{stamp}-{_flat(manifest.path)}" / top)) for top in tops)
        texts = tuple(
            (_inside(p.entry.key, run), p.names, _renamed(p, manifest.path, good))
            for p in pointers
            if p.resolved == manifest.path and p.kind in ("text", "best")
        )
        why = "; ".join(f"{f.code}: {f.message}" for f in verdict.findings if f.effect is Effect.UNSAFE)[:500]
        moves.append(Move(manifest.path, tuple((_inside(a, run), b) for a, b in files), texts, why))
    return moves


def _tops(manifest: Manifest) -> list[str]:
    """The paths to rename: the directory of a directory checkpoint, else its files."""
    keys = [f.entry.key for f in manifest.files]
    if all(k.startswith(f"{manifest.path}/") for k in keys):
        return [manifest.path]
    return sorted(keys)


def _flat(path: str) -> str:
    return path.replace("/", "__")


def _inside(key: str, run: str) -> str:
    return key[len(run) + 1 :] if run and key.startswith(f"{run}/") else key


def _renamed(pointer: Pointer, moved: str, good: str | None) -> str | None:
    """The pointer's new text: the good checkpoint, written as the old one was; None where the text is to go."""
    if good is None:
        return None
    old, new = moved.rpartition("/")[2], good.rpartition("/")[2]
    if old in pointer.names:
        return pointer.names.replace(old, new)
    digits_old = "".join(c for c in old if c.isdigit()).lstrip("0")
    digits_new = "".join(c for c in new if c.isdigit()).lstrip("0")
    return digits_new if pointer.names.strip() == digits_old else new


def carry_out(run: Path, moves: Sequence[Move]) -> list[str]:
    """Move what was planned, each checkpoint by renames with a record written first. Returns what was done, in words.

    Raises StoreError; nothing is lost at any moment: every step is a rename on one file system.
    """
    done = []
    for move in moves:
        target = run / Path(move.files[0][1]).parents[len(Path(move.files[0][0]).parts) - 1]
        target.mkdir(parents=True, exist_ok=True)
        record = {
            "schema": 1,
            "checkpoint": move.checkpoint,
            "files": move.files,
            "pointers": move.pointers,
            "why": move.why,
            "moved": time.time(),
        }
        write_atomically(target / RECORD, json.dumps(record, indent=1).encode())
        # The pointer first: between the two steps it names a good checkpoint rather than a missing one.
        for name, _, text in move.pointers:
            _point(run / name, text)
        for source, destination in move.files:
            place = run / destination
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                (run / source).rename(place)
            except OSError as e:
                raise StoreError(f"{source} could not be moved to {destination}: {e.strerror}") from e
        done.append(f"moved {move.checkpoint} to {target}")
    return done


def bring_back(run: Path) -> list[str]:
    """Undo every quarantine of a run: files and pointers as they were. Raises Refused where something took their place."""
    done = []
    for record_file in sorted((run / FOLDER).glob(f"*/{RECORD}")):
        record = json.loads(record_file.read_text(encoding="utf-8"))
        taken = [
            source
            for source, destination in record["files"]
            if (run / source).exists() and (run / destination).exists()
        ]
        if taken:
            raise Refused(
                f"{taken[0]} exists again: the quarantined one would overwrite it",
                "move one of the two away first",
            )
        for source, destination in record["files"]:
            if (run / destination).exists():
                (run / source).parent.mkdir(parents=True, exist_ok=True)
                (run / destination).rename(run / source)
        for name, old, _ in record["pointers"]:
            _point(run / name, old)
        shutil.rmtree(record_file.parent)
        done.append(f"brought back {record['checkpoint']}")
    return done


def _point(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink(missing_ok=True)
    else:
        ending = b"\n" if path.exists() and path.read_bytes().endswith(b"\n") else b""
        write_atomically(path, text.encode() + ending)


def write_atomically(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)

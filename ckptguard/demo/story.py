"""The demo, from a training to a proof: each scene runs the command that a user would run, and shows what it says."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptguard.demo.damage import DAMAGES, Damage, copy_run, what_torch_says
from ckptguard.errors import CkptguardError, MissingExtra, UsageError

MARK = ".ckptguard-demo"
RECIPE = "ckptguard.demo.recipe:Recipe"
COPIED = 3
"""So many checkpoints are copied for each damage: what all siblings lack is told from what one lacks."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo promises. `page` is the HTML page of the proof."""

    result: str
    bitwise: bool
    caught: Mapping[str, bool]
    page: Path

    @property
    def kept(self) -> bool:
        return self.result == "continuous" and self.bitwise and all(self.caught.values())


def prepare(folder: Path) -> None:
    """An empty folder for the demo. Raises UsageError for one that holds anything but an earlier demo."""
    if folder.exists():
        if not (folder / MARK).exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(
                f"{folder} exists and is not an earlier demo", "ckptguard demo --into ANOTHER_FOLDER"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).write_text("Made by `ckptguard demo`, which replaces it the next time.\n")


def tell(folder: Path, say: Say) -> Outcome:
    """Play the whole demo in a prepared folder. Raises MissingExtra, CkptguardError."""
    run, page = folder / "run", folder / "restore.html"
    began = time.perf_counter()
    _train(run, say)
    checkpoints = sorted(run.glob("step-*.pt"), key=lambda path: path.stat().st_mtime_ns)
    newest = checkpoints[-1]

    say(f"\n2. Audit: every byte of {len(checkpoints)} checkpoints, without loading one")
    document = _ask(say, "audit", str(run))
    for checkpoint in document["checkpoints"]:
        say(
            f"   step {checkpoint['step']:>4}  {checkpoint['resume']:<8} {_codes(checkpoint) or 'no finding'}"
        )

    say(
        f"\n3. Restore the newest, {newest.name}, into real objects, and replay the steps that the log has after it"
    )
    proof = _ask(say, "restore", str(newest), "--recipe", RECIPE, "--device", "cpu", "--html", str(page))
    _show_steps(proof, say)
    exactly = ", bit for bit" if proof["bitwise"] else ""
    say(f"   {proof['result']}{exactly}")

    say(
        f"\n4. Copies of the run, each with its newest checkpoint {newest.name} damaged: ckptguard preflight COPY"
    )
    caught = {}
    for damage in DAMAGES:
        caught[damage.name] = _damaged(folder / "damaged" / damage.name, damage, run, checkpoints, say)

    say(
        f"\n{sum(caught.values())} of {len(caught)} damages were caught, in {time.perf_counter() - began:.0f} seconds."
    )
    return Outcome(proof["result"], proof["bitwise"], caught, page)


def _train(run: Path, say: Say) -> None:
    try:
        from ckptguard.demo.training import EVERY, STEPS, train
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "torch", "the demo trains a model, which") from error
    say(f"1. Train a byte-level transformer on the standard library's own sources, {STEPS} steps on the CPU")
    began = time.perf_counter()
    recorder = train(run)
    cost = recorder.overhead
    say(f"   {STEPS} steps in {time.perf_counter() - began:.1f} s, a checkpoint every {EVERY}; "
        f"the recorder took {cost.mean * 1e3:.2f} ms a step")  # fmt: skip


def _damaged(folder: Path, damage: Damage, run: Path, checkpoints: Sequence[Path], say: Say) -> bool:
    """Play one damage; whether it was caught and named, and passed over where a look suffices to see it."""
    copy_run(run, folder, list(checkpoints[-COPIED:]))
    newest, previous = folder / checkpoints[-1].name, folder / checkpoints[-2].name
    damage.make(folder, newest, previous)
    say(f"\n   {damage.name}: {damage.what}")
    say(f"     torch.load         {what_torch_says(newest)}")
    decision = _ask(_silent, "preflight", str(folder))
    found = next(c for c in decision["checkpoints"] if Path(c["path"]).name == newest.name)
    chosen = decision["resume_from"]
    say(f"     preflight          {found['resume']}: {_codes(found) or 'no finding'}")
    _quote(found, say)
    say(f"     would resume from  {Path(chosen).name if chosen else 'nothing'}")
    passed_over = chosen is not None and Path(chosen).name != newest.name and bool(_loud(found))
    if damage.seen_by == "audit":
        return passed_over
    proof = _ask(_silent, "restore", str(newest), "--recipe", RECIPE, "--device", "cpu")
    say(f"     restore            {proof['result']}: {_codes(proof) or 'no finding'}")
    _quote(proof, say)
    return proof["result"] in ("diverged", "failed") and bool(_loud(proof))


def _silent(text: str) -> None:
    """Says nothing: the scene is told in other words."""


def _quote(document: Mapping[str, Any], say: Say) -> None:
    for finding in _loud(document)[:1]:
        say(f"                        {textwrap.shorten(finding['message'], 150)}")


def _loud(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    order = ("error", "warning")
    loud = [finding for finding in document["findings"] if finding["severity"] in order]
    return sorted(loud, key=lambda finding: order.index(finding["severity"]))


def _codes(document: Mapping[str, Any]) -> str:
    return ", ".join(dict.fromkeys(finding["code"] for finding in _loud(document)))


def _show_steps(proof: Mapping[str, Any], say: Say) -> None:
    for step in proof["steps"]:
        logged, replayed = step["logged"], step["replayed"]
        say(f"   step {step['step']:>4}  loss {logged['loss']:.6f} logged, {replayed['loss']:.6f} replayed"
            f"  {'same' if logged['loss'] == replayed['loss'] else 'differs'}")  # fmt: skip


def _ask(say: Say, *arguments: str) -> Any:
    """Run a command of ours as a user would, and return its JSON document. Raises CkptguardError when it has none."""
    say(f"   $ ckptguard {shlex.join(arguments)}")
    command = [sys.executable, "-m", "ckptguard", *arguments, "--json"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    try:
        document = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
        raise CkptguardError(f"ckptguard {arguments[0]} ended with {done.returncode}: {last[0]}") from None
    if "error" in document:
        raise CkptguardError(f"ckptguard {arguments[0]}: {document['error']['message']}")
    return document

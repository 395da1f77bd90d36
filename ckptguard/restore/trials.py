"""One trial, seen from outside: starts the child process, and makes a Trial of what it reported."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ckptguard.errors import CkptguardError, MissingExtra, OutOfMemory, RecipeError, TimedOut, UsageError
from ckptguard.model import NotRun
from ckptguard.restore.model import Difference, Fault, Limits, Order, StepNumbers, Trial
from ckptguard.restore.processes import run
from ckptguard.restore.recorded import SILENT

Progress = Callable[[str], None]

# Nothing of a replay may reach a tracker of experiments.
SILENT_TRACKERS = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "offline",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
TAIL = 2000


def run_trial(order: Order, limits: Limits, progress: Progress = lambda text: None) -> Trial:
    """Run one trial in a child process. Raises TimedOut, OutOfMemory, RecipeError for what is not the checkpoint's fault."""
    with tempfile.TemporaryDirectory(prefix="ckptguard-restore-") as scratch:
        folder = Path(scratch)
        order = replace(order, scratch=str(folder / "scratch"))
        (folder / "scratch").mkdir()
        (folder / "order.json").write_text(json.dumps(asdict(order)), encoding="utf-8")
        events = folder / "events.jsonl"
        command = [*_launcher(order), "-m", WORKER, str(folder / "order.json"), str(events)]
        watch = _Watch(events, progress)
        with (folder / "output").open("w+b") as output:
            ended = run(
                command, limits, output=output, env=_environment(order), until=watch.look, look_every=0.5
            )
            output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL))
            tail = output.read().decode(errors="replace")
        trial = fold(read_events(events))
    return settle(trial, ended.status, tail)


WORKER = "ckptguard.restore.worker"


def _launcher(order: Order) -> list[str]:
    if order.processes == 1:
        return [sys.executable]
    count = str(order.processes)
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]


def _environment(order: Order) -> dict[str, str]:
    env = {**os.environ, **SILENT_TRACKERS, "PYTHONUNBUFFERED": "1"}
    if order.processes > 1 and order.threads:
        env.setdefault("OMP_NUM_THREADS", str(order.threads))  # else torchrun sets 1
    kind, _, index = order.device.partition(":")
    if kind == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif kind == "cuda" and index and "CUDA_VISIBLE_DEVICES" not in env:
        # Libraries that choose a device by themselves must choose this one.
        env["CUDA_VISIBLE_DEVICES"] = index
    # MODULE:NAME is looked up from where the user stands.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), env.get("PYTHONPATH", "")]))
    return env


def settle(trial: Trial, exit_status: int | None, tail: str = "") -> Trial:
    """Raise what is an error of ours or of the recipe; keep what speaks of the checkpoint."""
    fault = trial.fault
    if fault is None and (exit_status != 0 or not trial.done):
        # Status 0 as well: the recipe's own os._exit() is no proof of anything.
        status = exit_status or 0
        how = f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
        hint = "the machine ran out of memory?" if status == -9 else ""
        message = f"the child process {how} before it was done"
        if status == -9:
            raise OutOfMemory(message, hint)
        raise RecipeError(f"{message}{_quoted(tail)}", hint)
    if fault is None:
        return trial
    if fault.kind == "memory":
        raise OutOfMemory(fault.message, fault.hint)
    if fault.kind == "timeout":
        raise TimedOut(fault.message, fault.hint)
    if fault.kind == "internal":
        hint = f"this is a fault of ckptguard; please report its traceback:{_quoted(fault.detail)}"
        raise CkptguardError(f"the child process stumbled: {fault.message}", hint)
    if fault.kind == "extra":
        raise MissingExtra("torch", "torch", "restoring with a recipe")
    if fault.kind == "usage":
        raise UsageError(fault.message, fault.hint)
    if fault.kind == "recipe":
        if any(d.kind not in SILENT for d in trial.state):
            # That the state was restored wrongly is proven; that the steps then fail is most likely its consequence.
            return replace(trial, fault=None, not_run=(*trial.not_run, NotRun("replay", fault.message)))
        detail = _quoted(fault.detail)
        raise RecipeError(fault.message, fault.hint or (f"its traceback ends:{detail}" if detail else ""))
    return trial


def _quoted(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()][-6:]
    return "\n" + "\n".join(f"  | {line}" for line in lines) if lines else ""


class _Watch:
    """Passes the child's stages on as progress. Never ends the child."""

    def __init__(self, events: Path, progress: Progress) -> None:
        self._events = events
        self._progress = progress
        self._shown = 0

    def look(self) -> bool:
        events = read_events(self._events)
        for text in filter(None, map(_shown, events[self._shown :])):
            self._progress(text)
        self._shown = len(events)
        return False


def _shown(event: Mapping[str, Any]) -> str:
    if event["event"] == "step":
        return f"replayed step {event.get('step')}: loss {event.get('loss')}"
    return {"loaded": "loaded", "state": "state compared"}.get(event["event"], "")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The whole lines that the child wrote; a torn last one is no event yet."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def fold(events: Iterable[Mapping[str, Any]]) -> Trial:
    """The trial that a sequence of events describes. Pure."""
    trial = Trial()
    for event in events:
        values = {key: value for key, value in event.items() if key != "event"}
        match event["event"]:
            case "environment":
                trial = replace(trial, device=values["device"], environment=_flat(values["environment"]))
            case "state":
                found = tuple(Difference(**d) for d in values["differences"])
                trial = replace(trial, compared=values["compared"], state=found)
            case "rng":
                draws = {stream: tuple(words) for stream, words in values["draws"].items()}
                trial = replace(trial, rng_restored=tuple(values["restored"]), draws=draws)
            case "probe":
                trial = replace(trial, probe=values["loss"])
            case "step":
                trial = replace(trial, steps=(*trial.steps, StepNumbers(**values)))
            case "against":
                found = tuple(Difference(**d) for d in values["differences"])
                trial = replace(trial, against_compared=values["compared"], against=found, end=values["end"])
            case "fixed_batches":
                trial = replace(trial, fixed_batches=True)
            case "not_run":
                trial = replace(trial, not_run=(*trial.not_run, NotRun(**values)))
            case "fault":
                trial = replace(trial, fault=Fault(**values))
            case "done":
                trial = replace(trial, seconds=values["seconds"], done=True)
    return trial


COMPARED_VERSIONS = ("torch", "transformers", "numpy")


def _flat(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What of an environment decides numbers, as one flat map."""
    return flat_environment(environment.get("versions", {}), environment)


def flat_environment(versions: Mapping[str, str], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Versions of the libraries that compute, and everything that the recorder states of the machine."""
    flat = {key: value for key, value in environment.items() if key != "versions"}
    flat |= {name: versions[name] for name in COMPARED_VERSIONS if name in versions}
    return flat

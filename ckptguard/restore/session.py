"""The stages that every kind of recipe goes through in the child process, each reported as soon as it is known."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ckptguard.errors import CkptguardError
from ckptguard.model import NotRun, Tensor
from ckptguard.record.environment import environment, versions
from ckptguard.record.rng import next_draws, preserved_rng
from ckptguard.restore.components import canonical, form_of, renames
from ckptguard.restore.equality import Comparison, compare
from ckptguard.restore.held import Held, open_checkpoint
from ckptguard.restore.leaves import Leaf, live_leaves
from ckptguard.restore.leaves import Path as LeafPath
from ckptguard.restore.model import Difference, Fault, Order, StepNumbers
from ckptguard.restore.streams import set_streams

MEASURED = 3
"""Of so many differing tensors per component it is said how far they lie apart."""
REPORTED = 200

StateOf = Callable[[], Any]


class Stop(BaseException):
    """Ends a training loop that is not ours, past its own `except Exception`."""


class Session:
    """One trial in the making. Every method that finds something appends one line to the file of events."""

    def __init__(self, order: Order, events: Path) -> None:
        self.order = order
        self.held = open_checkpoint(order.checkpoint)
        self.began = time.perf_counter()
        self._counterparts: dict[str, str] = {}
        self._events = events.open("a", encoding="utf-8")

    def note(self, event: str, **values: Any) -> None:
        """Report a stage; it counts even if the process is killed the next moment."""
        self._events.write(json.dumps({"event": event, **values}) + "\n")
        self._events.flush()

    def not_run(self, check: str, why: str) -> None:
        self.note("not_run", **asdict(NotRun(check, why)))

    def environment(self, device: str) -> None:
        """Report where this runs; called once the device is in use."""
        here = {**environment(), "versions": versions()}
        self.note("environment", device=device, environment={**here, "device": device.partition(":")[0]})

    @property
    def last_step(self) -> int | None:
        """The step to replay up to, when the checkpoint's own is known."""
        first = self.order.first
        return None if first is None else max(first + self.order.steps, self.order.until or 0)

    # --- state --------------------------------------------------------------------------------------------

    def check_state(self, parts: Mapping[str, StateOf], *, own_names: bool = False) -> None:
        """Compare the restored parts with what the checkpoint holds, both ways.

        `own_names`: the recipe loads them itself, and may call them otherwise than the file does.
        """
        if not self.held.places:
            self.not_run("state", f"the layout {self.order.layout} is not taken apart into components")
            return
        if own_names:
            self._find_counterparts(parts)
        differences, compared, _ = self._compare(self.held, parts)
        used = {self._component(part) for part in parts}
        for name in sorted(set(self.held.components()) - used):
            form = form_of(name, self.held.saved(name))
            if form:
                subject = self.held.places[name].files[0]
                differences.append(Difference("unused", name, "", subject, saved=form))
        self.note("state", compared=compared, differences=[asdict(d) for d in differences[:REPORTED]])

    def _component(self, part: str) -> str:
        return self._counterparts.get(part) or canonical(part)

    def _find_counterparts(self, parts: Mapping[str, StateOf]) -> None:
        """Of parts that no component is named like: the one that holds the same names inside, equal values first.

        One that was not loaded may hold fewer (an optimizer has no moments yet); then its form must be the same.
        """
        free = [
            name
            for name in self.held.components()
            if name not in {canonical(part) for part in parts} and isinstance(self.held.saved(name), Mapping)
        ]
        saved = {name: self.held.leaves(name) for name in free}
        for part, state_of in parts.items():
            if canonical(part) in self.held.places or not free:
                continue
            state = state_of()
            live = live_leaves(state)
            alike = [name for name in free if live and saved[name].keys() == live.keys()] or [
                name
                for name in free
                if live.keys() < saved[name].keys()
                and form_of("", state) == form_of("", self.held.saved(name)) != ""
            ]
            if alike:
                best = min(alike, key=lambda name: len(compare(name, saved[name], live).differences))
                self._counterparts[part] = best
                free.remove(best)

    def _compare(self, held: Held, parts: Mapping[str, StateOf]) -> tuple[list[Difference], int, str]:
        """(differences, values compared, digest of the live state)."""
        differences: list[Difference] = []
        compared = 0
        whole = xxhash.xxh3_128()
        for part, state_of in parts.items():
            component = self._component(part)
            state = state_of()
            live = live_leaves(state)
            for path, leaf in sorted(live.items()):
                whole.update(f"{component}.{'.'.join(path)}={leaf.digest or leaf.value!r};".encode())
            if component not in held.places:
                if live:
                    subject = f"{held.root.name}:{component}"
                    differences.append(
                        Difference("absent", component, "", subject, restored=f"{len(live)} values")
                    )
                continue
            found = self._compare_part(held, component, live)
            compared += found.compared
            differences += [*_measured(held, component, state, found.differences)]
        return differences, compared, whole.hexdigest()

    def _compare_part(self, held: Held, component: str, live: Mapping[LeafPath, Leaf]) -> Comparison:
        saved = held.leaves(component)
        if component in ("model", "ema"):
            # DDP, FSDP and torch.compile put their names in between; that is no other state.
            names = renames((".".join(p) for p in saved), (".".join(p) for p in live))
            if names:
                saved = {tuple(names[".".join(path)].split(".")): leaf for path, leaf in saved.items()}
                live = {tuple(".".join(path).split(".")): leaf for path, leaf in live.items()}
        return compare(component, saved, live)

    # --- random generators --------------------------------------------------------------------------------

    def restore_streams(self) -> None:
        """Set the global random generators to the checkpoint's states and report what they would draw next."""
        streams = self.held.streams()
        if not streams:
            self.seed()
            return
        done = set_streams(streams)
        self.held.release()
        self.report_streams(done)

    def report_streams(self, restored: tuple[str, ...]) -> None:
        self.note("rng", restored=list(restored), draws={k: list(v) for k, v in next_draws().items()})

    def seed(self) -> None:
        """Where the framework saves no generators: begin with the repeat's own seed."""
        import random

        import torch

        if self.order.seed is not None:
            random.seed(self.order.seed)
            np.random.seed(self.order.seed)
            torch.manual_seed(self.order.seed)
        self.report_streams(())

    # --- steps --------------------------------------------------------------------------------------------

    def step(self, numbers: StepNumbers) -> None:
        self.note("step", **asdict(numbers))

    def check_against(self, parts: Mapping[str, StateOf]) -> None:
        """Compare the whole state with the later checkpoint, the random generators included."""
        assert self.order.against is not None  # the caller asked for it
        try:
            later = open_checkpoint(self.order.against)
            differences, compared, end = self._compare(later, parts)
            expected = later.streams()
        except CkptguardError as error:
            # That other checkpoint is no evidence then, for or against this one.
            self.not_run("against", f"it cannot be read: {error.message}")
            return
        if expected:
            here = next_draws()
            with preserved_rng():
                streams = set_streams(expected)
                there = next_draws()
            for stream in (s for s in here if s.partition(":")[0] in streams):
                compared += 1
                if here[stream] != there[stream]:
                    subject = f"{later.root.name}:{stream}"
                    shown = there[stream][0], here[stream][0]
                    differences.append(Difference("changed", "rng", stream, subject, *shown))
        self.note(
            "against", compared=compared, end=end, differences=[asdict(d) for d in differences[:REPORTED]]
        )

    # --- the end ------------------------------------------------------------------------------------------

    def fault(self, fault: Fault) -> None:
        self.note("fault", **asdict(fault))

    def done(self) -> None:
        self.note("done", seconds=time.perf_counter() - self.began)

    def close(self) -> None:
        self._events.close()


def _measured(
    held: Held, component: str, state: Any, differences: tuple[Difference, ...]
) -> list[Difference]:
    """The differences, the first few of those in numbers with their size."""
    found = list(differences)
    wanted = [at for at, d in enumerate(found) if d.kind == "changed" and d.size is None][:MEASURED]
    for at in wanted:
        size = _distance(held, component, state, found[at].path)
        if size is not None:
            found[at] = replace(found[at], size=size)
    return found


def _distance(held: Held, component: str, state: Any, path: str) -> float | None:
    """The largest absolute difference between a saved and a live tensor; None where they are no numbers."""
    place = held.places[component]
    for name in place.files:
        tensor = _at(held.saved(component) if len(place.files) == 1 else held.tree(name), path)
        live = _at(state, path)
        if isinstance(tensor, Tensor) and hasattr(live, "detach"):
            saved = held.numbers(name, tensor)
            if saved is None:
                return None
            here = live.detach().cpu().double().numpy()
            off = np.abs(saved.astype(np.float64) - here)
            return float(off.max()) if off.size and np.isfinite(off).any() else None
    return None


def _at(tree: Any, path: str) -> Any:
    """What lies at a dotted path of keys given as text; names of weights contain dots themselves."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            text = str(key)
            if path == text:
                return value
            if path.startswith(f"{text}.") and isinstance(value, Mapping | list | tuple):
                return _at(value, path[len(text) + 1 :])
    elif isinstance(tree, list | tuple):
        head, _, rest = path.partition(".")
        if head.isdecimal() and int(head) < len(tree):
            return _at(tree[int(head)], rest) if rest else tree[int(head)]
    return None


def tail_of(error: BaseException, lines: int = 6) -> str:
    """The end of a traceback: where in the user's code it happened."""
    text = "".join(traceback.format_exception(error))
    return "\n".join(text.strip().splitlines()[-lines:])

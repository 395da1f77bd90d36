"""NeMo 2 checkpoints: `NAME--METRIC=V-step=S-consumed_samples=C[-last]/` with `weights/` (megatron-core) and `context/`.

A file `<directory>-unfinished` beside it says that it is still being written, or being deleted. What is checked besides
what every megatron-core save is: that mark; step and consumed samples of the name against Lightning's state inside.
What cannot be: the data pipeline's own position, and the pickled objects that `context/` describes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from ckptguard.layouts._base import LayoutBase, is_temporary, link_pointer, rest_of, series_of
from ckptguard.layouts._dcp import is_committed
from ckptguard.layouts._megatron import CONFIG, is_torch_dist, torch_dist_absences, torch_dist_files
from ckptguard.layouts._megatron_state import add_megatron
from ckptguard.layouts._state import Builder
from ckptguard.model import Absence, Directory, FileFacts, Manifest, ManifestFile, Pointer, Role, State
from ckptguard.ports import Resolve

STEP = re.compile(r"(?:^|[-_])step=(\d+)")
SAMPLES = re.compile(r"consumed_samples=(\d+)")
LAST = "-last"
MARK = "-unfinished"
CONTEXT = {"io.json": (Role.CONFIG, "json"), "model.yaml": (Role.CONFIG, "text")}


class Nemo(LayoutBase):
    name = "nemo"
    order = 1100

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        weights, context = directory.dirs.get("weights"), directory.dirs.get("context")
        named = STEP.search(directory.name)
        if weights is None or not is_torch_dist(weights):
            # Only a name of NeMo's own says that a folder without weights was to be a checkpoint.
            if context is None or named is None or not SAMPLES.search(directory.name):
                return ()
            weights = None
        elif context is None and named is None:
            return ()
        base = directory.path
        files = torch_dist_files(weights, base) if weights else []
        for name, (role, format) in CONTEXT.items():
            entry = context.files.get(name) if context else None
            if entry is not None:
                files.append(ManifestFile(f"context/{name}", entry, role, format))
        files += rest_of(directory, files, base)
        absences = (
            torch_dist_absences(weights, base)
            if weights
            else [
                Absence(
                    "missing-file", "weights", "there is a context/ and no weights/ with a checkpoint in it"
                )
            ]
        )
        marked = directory.name + MARK in directory.beside
        if marked:
            absences.append(
                Absence(
                    "incomplete-save",
                    directory.name + MARK,
                    f"{directory.name}{MARK} lies beside it: the save, or its deletion, did not finish; NeMo deletes such directories",
                )
            )
        step = STEP.search(directory.name)
        stem = directory.name.removesuffix(LAST)
        return (
            Manifest(
                path=base,
                layout=self.name,
                files=tuple(files),
                step=int(step.group(1)) if step else None,
                carries=frozenset({"model", "optimizer", "scheduler", "rng", "config"}),
                gaps=("dataloader",),
                documented_absent=frozenset({"optimizer", "scheduler"})
                if directory.name.endswith(LAST)
                else frozenset(),
                absences=tuple(absences),
                finished=not marked
                and weights is not None
                and CONFIG in weights.files
                and is_committed(weights)
                and not is_temporary(directory.name),
                temporary=is_temporary(directory.name),
                series=series_of(stem),
                attributes={"indexed": True},
            ),
        )

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        add_megatron(builder, files, "weights/")
        named = SAMPLES.search(manifest.path.rpartition("/")[2])
        if named:
            builder.add_counter("name.consumed_samples", int(named.group(1)), manifest.path, "samples")
        if builder.step is not None:
            # The name counts from 0: step=999 is what a run of 1000 steps ends with.
            builder.add_counter("step of the name", builder.step - 1, manifest.path, "save")
        if any(f.name in ("context/io.json", "context/model.yaml") for f in manifest.files):
            builder.components["config"] = True
        return builder.build()

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        """Links to the last save, where NeMo was told to link instead of copying."""
        found = [
            link_pointer(directory, name, self.name)
            for name, entry in sorted(directory.files.items())
            if entry.kind == "link" and name.endswith(LAST) and STEP.search(name)
        ]
        return tuple(p for p in found if p is not None)


LAYOUT = Nemo()

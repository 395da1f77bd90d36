"""Megatron-Bridge's `iter_NNNNNNN` directories: megatron-core's `torch_dist` with `train_state.pt` and `run_config.yaml`.

What is checked besides what every megatron-core save is: that directory name, train state and common state are at one step,
and that consumed samples fit it. What cannot be: the position inside energon or other external data loaders, whose files lie
in another directory; the exported `hf/` folder is read for integrity, not compared with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckptguard.layouts._base import LayoutBase, is_temporary, rest_of
from ckptguard.layouts._dcp import is_committed
from ckptguard.layouts._megatron import (
    CONFIG,
    is_torch_dist,
    iteration_in,
    torch_dist_absences,
    torch_dist_files,
    tracker_pointer,
)
from ckptguard.layouts._megatron_state import add_megatron
from ckptguard.layouts._state import Builder, integer
from ckptguard.model import Absence, Directory, FileFacts, Manifest, ManifestFile, Pointer, Role, State
from ckptguard.ports import Resolve

TRAIN_STATE = "train_state.pt"
RUN_CONFIG = "run_config.yaml"


class MegatronBridge(LayoutBase):
    name = "megatron-bridge"
    order = 90

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        names = directory.files.keys()
        if not is_torch_dist(directory) or not {TRAIN_STATE, RUN_CONFIG} & names:
            return ()
        base = directory.path
        files = torch_dist_files(directory, base)
        for name, role, format in (
            (TRAIN_STATE, Role.TRAINER_STATE, "torch"),
            (RUN_CONFIG, Role.CONFIG, "text"),
        ):
            if name in names:
                files.append(ManifestFile(name, directory.files[name], role, format))
        export = directory.dirs.get("hf")
        for entry in export.walk() if export else ():
            if entry.name.endswith(".safetensors") and entry.kind == "file":
                files.append(
                    ManifestFile(entry.key[len(base) + 1 if base else 0 :], entry, Role.OTHER, "safetensors")
                )
        files += rest_of(directory, files, base)
        absences = torch_dist_absences(directory, base)
        if TRAIN_STATE not in names:
            absences.append(
                Absence(
                    "incomplete-save",
                    TRAIN_STATE,
                    f"{TRAIN_STATE} is not there; Megatron-Bridge writes it when the shards are done and needs it to resume",
                )
            )
        return (
            Manifest(
                path=base,
                layout=self.name,
                files=tuple(files),
                step=iteration_in(directory.name),
                carries=frozenset({"model", "optimizer", "scheduler", "rng", "config"}),
                gaps=("dataloader",),
                absences=tuple(absences),
                finished=CONFIG in names
                and TRAIN_STATE in names
                and is_committed(directory)
                and not is_temporary(directory.name),
                temporary=is_temporary(directory.name),
                series="iter_#" if iteration_in(directory.name) is not None else directory.name,
                attributes={"indexed": True},
            ),
        )

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        add_megatron(builder, files)
        facts = files.get(TRAIN_STATE)
        tree = facts.tree if facts is not None and isinstance(facts.tree, dict) else {}
        step = integer(tree.get("step"))
        builder.add_counter("train_state.step", step, TRAIN_STATE)
        builder.add_counter(
            "train_state.consumed_train_samples", tree.get("consumed_train_samples"), TRAIN_STATE, "samples"
        )
        if step is not None and builder.step is not None and step != builder.step:
            builder.problem(
                TRAIN_STATE,
                "step-mismatch",
                "step",
                f"it is of step {step}, the common state of iteration {builder.step}",
            )
        if step is not None:
            builder.step = step
        if RUN_CONFIG in files:
            builder.components["config"] = True
        return builder.build()

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        """The tracker text; `latest_train_state.pt` beside it is a torch file that says the same."""
        if "latest_train_state.pt" not in directory.files:
            return ()
        pointer = tracker_pointer(directory, read, self.name)
        return (pointer,) if pointer is not None else ()


LAYOUT = MegatronBridge()

"""Megatron-LM's checkpoints: `iter_NNNNNNN` directories of megatron-core (`torch_dist`, also old zarr ones) or legacy.

What is checked: the completion mark `metadata.json`; metadata, items and CRC-32 as in every DCP save; the common state in
`common.pt` (core 0.16) or among the items (newer); that sharded objects have all their parts; iteration, consumed samples
and schedule against one another; fp32 masters against weights; `integrity.json` where it was written (SHA-256). Of the
legacy format: that all model-parallel ranks are there and agree. What cannot be: the built-in dataset stores no position
of its own but the number of consumed samples; zarr arrays are listed, not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckptguard.layouts._base import LayoutBase, is_temporary, rest_of
from ckptguard.layouts._dcp import is_committed
from ckptguard.layouts._megatron import (
    COMMON,
    CONFIG,
    RANK_DIR,
    is_legacy,
    is_torch_dist,
    is_zarr,
    iteration_in,
    rank_absences,
    torch_dist_absences,
    torch_dist_files,
    tracker_pointer,
)
from ckptguard.layouts._megatron_legacy import add_legacy
from ckptguard.layouts._megatron_state import add_megatron, add_progress
from ckptguard.layouts._state import Builder
from ckptguard.model import Absence, Directory, FileFacts, Manifest, ManifestFile, Pointer, Role, State
from ckptguard.ports import Resolve

BRIDGE = ("train_state.pt", "run_config.yaml")


class Megatron(LayoutBase):
    name = "megatron"
    order = 100

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        if any(name in directory.files for name in BRIDGE):
            return ()
        if is_torch_dist(directory):
            return (
                self._manifest(
                    directory,
                    torch_dist_files(directory, directory.path),
                    torch_dist_absences(directory, directory.path),
                    "torch_dist",
                ),
            )
        if is_zarr(directory):
            return (self._manifest(directory, torch_dist_files(directory, directory.path), [], "zarr"),)
        if is_legacy(directory):
            return (
                self._manifest(directory, list(_legacy_files(directory)), rank_absences(directory), "torch"),
            )
        return ()

    def _manifest(
        self, directory: Directory, files: list[ManifestFile], absences: list[Absence], format: str
    ) -> Manifest:
        files += rest_of(directory, files, directory.path)
        names = directory.files.keys()
        # Megatron's plain DCP formats have no metadata.json; whether this is one of them shows in the metadata only.
        finished = format == "torch" or (
            (CONFIG in names or COMMON not in names) and (format == "zarr" or is_committed(directory))
        )
        return Manifest(
            path=directory.path,
            layout=self.name,
            files=tuple(files),
            step=iteration_in(directory.name),
            carries=frozenset({"model", "optimizer", "scheduler", "rng"})
            if format != "zarr"
            else frozenset(),
            gaps=("dataloader",),
            absences=tuple(absences),
            finished=finished and not is_temporary(directory.name),
            temporary=is_temporary(directory.name),
            series="iter_#" if iteration_in(directory.name) is not None else directory.name,
            attributes={"format": format, "indexed": format == "torch_dist"},
        )

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        format = manifest.attributes.get("format")
        if format == "torch":
            add_legacy(builder, manifest, files)
        elif format == "zarr":
            _zarr(builder, manifest, files)
        else:
            add_megatron(builder, files)
        return builder.build()

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        pointer = tracker_pointer(directory, read, self.name)
        return (pointer,) if pointer is not None else ()


def _legacy_files(directory: Directory) -> list[ManifestFile]:
    files = []
    for number, (name, sub) in enumerate(
        sorted((n, d) for n, d in directory.dirs.items() if RANK_DIR.match(n))
    ):
        for file, entry in sorted(sub.files.items()):
            if file.endswith(".pt"):
                role = (
                    Role.OPTIMIZER
                    if file.startswith(("distrib_optim", "layer_wise_optimizer"))
                    else Role.BUNDLE
                )
                files.append(ManifestFile(f"{name}/{file}", entry, role, "torch", number))
    return files


def _zarr(builder: Builder, manifest: Manifest, files: Mapping[str, FileFacts]) -> None:
    """What names and the common state say; the arrays themselves are not read."""
    common = files.get(COMMON)
    if common is not None and isinstance(common.tree, dict):
        add_progress(builder, common.tree, COMMON)
    arrays = {f.name.partition("/")[0] for f in manifest.files if f.name.endswith("/.zarray")}
    builder.components["model"] = any(not a.startswith("optimizer") for a in arrays)
    builder.components["optimizer"] = any(a.startswith("optimizer") for a in arrays)
    builder.problem(
        CONFIG,
        "unverifiable",
        "",
        f"{len(arrays)} zarr arrays were listed, not read: this format of megatron-core was given up before 0.16",
    )


LAYOUT = Megatron()

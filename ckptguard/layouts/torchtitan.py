"""torchtitan's `step-N` directories (torchtitan/components/checkpointer), DCP saves with its own choice of keys.

Model names stand at the top of the state dictionary; optimizer state is flattened by parameter name; each data-parallel
rank's loader state is pickled bytes inside an item, a pickle that the load executes and that is therefore read here too.
What is checked besides what every DCP save is: that name, train state, scheduler and optimizer are at one step, and that
there is a loader state for each data-parallel rank. What cannot be: RNG, which torchtitan does not save. Its last save
holds the model only, by its default; `step-0` may be a seed checkpoint. torchft's `ft-replicat-*/step-N` hold loaders only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptguard.formats._nested import decoded
from ckptguard.layouts._base import LayoutBase
from ckptguard.layouts._dcp import (
    Content,
    add_faults,
    add_loose,
    add_state,
    dcp_manifest,
    has_dcp,
    is_titan,
    read_dcp,
    top_weights,
)
from ckptguard.layouts._state import Builder, integer
from ckptguard.model import Directory, FileFacts, Manifest, State
from ckptguard.ports import Resolve

PARTS = frozenset({"optimizer", "lr_scheduler", "train_state", "dataloader"})
LOADER = re.compile(r"^dp_rank_(\d+)$")


class Torchtitan(LayoutBase):
    name = "torchtitan"
    order = 1190

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        if (
            not is_titan(directory)
            or not has_dcp(directory)
            or "metadata.json" in directory.files
            or "meta.pt" in directory.files
        ):
            return ()
        return (dcp_manifest(directory, self.name),)

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        """By the keys: a plain DCP save whose directory is called `step-N` is said to be one."""
        builder = Builder(manifest)
        content = read_dcp(files)
        add_faults(builder, content)
        tree = content.tree() if content.index is not None else {}
        if content.index is not None and not _is_titans(tree):
            builder.layout = "dcp"
        loaders = tree.pop("dataloader", None) if not builder.layout else None
        add_state(builder, content, tree)
        add_loose(builder, manifest, files)
        if not builder.layout and content.index is not None:
            _finish(builder, content, loaders)
        return builder.build()


def _is_titans(tree: Mapping[Any, Any]) -> bool:
    """Model names at the top, and beside them nothing but torchtitan's own parts."""
    weights = top_weights(tree)
    rest = {str(key) for key in tree if key not in weights}
    if not rest <= PARTS:
        return False
    return bool(weights) or rest == {"dataloader"}


def _finish(builder: Builder, content: Content, loaders: Any) -> None:
    builder.gaps = ("rng",)
    builder.components["rng"] = None
    for counter in [c for c in builder.counters if c.name == "train_state.step"][:1]:
        seen = content.tensors.get(
            "train_state.ntokens_seen", content.objects.get("train_state.ntokens_seen")
        )
        builder.add_counter("train_state.ntokens_seen", seen, counter.subject, "tokens")
    if isinstance(loaders, dict):
        for key, value in loaders.items():
            rank = LOADER.match(str(key))
            if rank:
                held = decoded(value)
                file = content.files.get(f"dataloader.{key}", content.prefix)
                builder.add_loader(
                    held if isinstance(held, dict) else {"state": held}, file, int(rank.group(1))
                )
        size = integer(loaders.get("world_size", loaders.get("dp_world_size")))
        if size is not None:
            builder.topology["dp"] = size
    if not builder.optimizers and not builder.schedulers:
        builder.attributes["model_only"] = True


LAYOUT = Torchtitan()

"""OpenRLHF's checkpoints: `_actor/` and `_critic/` are DeepSpeed save directories, each with a `latest` of its own.

Best ones are tags `best_global_stepN`. Client state: `consumed_samples` (SFT, DPO), or `episode`, `global_step` and the
prompt loader's state (PPO). `metric.json` comes after the tag's other files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckptguard.layouts._base import LayoutBase, series_of, text_pointer
from ckptguard.layouts._deepspeed_files import claim_tag, holds_tags
from ckptguard.layouts._deepspeed_state import add_tag
from ckptguard.layouts._state import Builder
from ckptguard.model import Directory, FileFacts, Manifest, Pointer, State
from ckptguard.ports import Resolve

ROLES = ("_actor", "_critic")


class OpenRlhf(LayoutBase):
    name = "openrlhf"
    order = 390  # before DeepSpeed, whose files these are

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        parent = directory.path.split("/")[-2:-1]
        manifest = claim_tag(directory, self.name) if parent and parent[0] in ROLES else None
        if manifest is None:
            return ()
        best = directory.name.startswith("best_")
        return (
            replace(manifest, series=f"{parent[0]}/{'best/' if best else ''}{series_of(directory.name)}"),
        )

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        add_tag(builder, manifest.files, files)
        return builder.build()

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        if directory.name not in ROLES or not holds_tags(directory):
            return ()
        found = text_pointer(directory, "latest", read, self.name)
        return () if found is None else (found,)


LAYOUT = OpenRlhf()

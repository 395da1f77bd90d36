"""DeepSpeed's tag directories: ZeRO 0 to 3, pipeline, mixture of experts, universal.

`latest` is written by rank 0 before the other ranks' files are known to be there, so it proves nothing: the files are
counted against the world size that is recorded in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckptguard.layouts._base import LayoutBase, text_pointer
from ckptguard.layouts._deepspeed_files import claim_tag, holds_tags
from ckptguard.layouts._deepspeed_state import add_tag
from ckptguard.layouts._state import Builder
from ckptguard.model import Directory, FileFacts, Manifest, Pointer, State
from ckptguard.ports import Resolve


class DeepSpeed(LayoutBase):
    name = "deepspeed"
    order = 400

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        manifest = claim_tag(directory, self.name)
        return (manifest,) if manifest is not None else ()

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        add_tag(builder, manifest.files, files)
        if manifest.attributes.get("universal"):
            # A conversion loads only where universal loading is asked for: the save that it was made of goes first.
            builder.attributes["attempt"] = -1
        return builder.build()

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        if not holds_tags(directory):
            return ()
        found = (
            text_pointer(directory, "latest", read, self.name),
            text_pointer(directory, "latest_universal", read, self.name),
        )
        return tuple(
            replace(p, kind="universal") if p.entry.name == "latest_universal" else p
            for p in found
            if p is not None
        )


LAYOUT = DeepSpeed()

"""PyTorch's distributed checkpoint: a directory of `__R_I.distcp` shards and a `.metadata` that is written last.

Written by `torch.distributed.checkpoint` directly (FSDP2, tensor parallel, plain modules; with or without collectives,
also asynchronously). What is checked: the metadata's pickle; every item's archive and CRC-32; that chunks tile their
tensors and items their files; dtypes and shapes in items against the metadata; the state behind the keys. What cannot be:
items that were compressed or encrypted on the way to disk, and shards in the safetensors format, which has no checksum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptguard.layouts._base import LayoutBase
from ckptguard.layouts._dcp import OTHERS, dcp_manifest, has_dcp, interpret
from ckptguard.layouts._dcp_safetensors import (
    half_manifest,
    has_shards,
    interpret_shards,
    is_half_consolidated,
    shards_manifest,
)
from ckptguard.model import Directory, FileFacts, Manifest, State
from ckptguard.ports import Resolve


class Dcp(LayoutBase):
    name = "dcp"
    order = 1200

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        if has_shards(directory):
            return (shards_manifest(directory, self.name),)
        if is_half_consolidated(directory):
            return (half_manifest(directory, self.name),)
        if not has_dcp(directory) or any(other(directory) for other in OTHERS):
            return ()
        return (dcp_manifest(directory, self.name),)

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        if manifest.attributes.get("format") == "safetensors-shards":
            return interpret_shards(manifest, files)
        return interpret(manifest, files)


LAYOUT = Dcp()

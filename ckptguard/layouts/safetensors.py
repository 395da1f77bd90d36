"""Weights alone, as `save_pretrained` writes them: one file, or shards with an index; full models and adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptguard.layouts._base import LayoutBase, is_temporary, rest_of, series_of, step_in
from ckptguard.layouts._hf import (
    add_config,
    add_tokenizer,
    add_weights,
    has_weights,
    weight_files,
)
from ckptguard.layouts._state import Builder
from ckptguard.model import Directory, FileFacts, Manifest, ManifestFile, Role, State
from ckptguard.ports import Resolve


class Safetensors(LayoutBase):
    name = "safetensors"
    order = 1500

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        if any(name.startswith("shard-") and "-model-" in name for name in directory.files):
            return ()  # pieces of tensors, which DCP's own writer left
        if has_weights(directory):
            return (self._directory(directory),)
        lone = [
            e for n, e in sorted(directory.files.items()) if n.endswith(".safetensors") and e.kind == "file"
        ]
        return tuple(
            Manifest(
                path=entry.key,
                layout=self.name,
                files=(ManifestFile(entry.name, entry, Role.MODEL, "safetensors"),),
                step=step_in(entry.name),
                carries=frozenset({"model", "optimizer", "scheduler", "rng"}),
                certain=step_in(entry.name) is not None,
                temporary=is_temporary(entry.name),
                series=series_of(entry.name),
                attributes={"weights_only": True, "one_file": True, "speaks": True},
            )
            for entry in lone
        )

    def _directory(self, directory: Directory) -> Manifest:
        files = list(weight_files(directory, directory.path))
        for name, sub in directory.dirs.items():  # further adapters lie in folders by their names
            if (
                "adapter_config.json" in sub.files
                and "adapter_config.json" in directory.files
                and name not in ("", ".")
            ):
                files += weight_files(sub, directory.path)
        files += rest_of(Directory(directory.path, directory.files, {}), files, directory.path)
        return Manifest(
            path=directory.path,
            layout=self.name,
            files=tuple(files),
            step=step_in(directory.name),
            carries=frozenset({"model", "optimizer", "scheduler", "rng", "config"}),
            temporary=is_temporary(directory.name),
            finished=not is_temporary(directory.name),
            series=series_of(directory.name),
            attributes={"weights_only": True},
        )

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        add_weights(builder, manifest, files)
        add_config(builder, files)
        add_tokenizer(builder, files)
        builder.components.setdefault("config", None if manifest.attributes.get("one_file") else False)
        return builder.build()


LAYOUT = Safetensors()

"""torchtune's `epoch_E/` and `step_S/` directories: weights as Hugging Face writes them, and `recipe_state.pt` last.

Older releases keep one `recipe_state/recipe_state.pt` for the whole run, which belongs to the newest directory. The
last save of a run has no recipe state, by design. Distributed saves are DCP directories and judged as such.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptguard.formats.text import as_object
from ckptguard.layouts._base import LayoutBase, is_temporary, rest_of, series_of
from ckptguard.layouts._hf import add_config, add_tokenizer, add_weights, has_weights, weight_files
from ckptguard.layouts._state import Builder, integer, is_optimizer, items
from ckptguard.model import Directory, Entry, FileFacts, Manifest, ManifestFile, Role, State
from ckptguard.ports import Resolve

NAME = re.compile(r"^(epoch|step)_(\d+)$")
RECIPE = "recipe_state.pt"
SHARED = "recipe_state"
ADAPTER = "adapter_model.pt"


class Torchtune(LayoutBase):
    name = "torchtune"
    order = 1000

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        if RECIPE in directory.files and (
            has_weights(directory) or NAME.match(directory.name) or ADAPTER in directory.files
        ):
            return (self._save(directory, directory.files[RECIPE]),)
        shared = directory.dirs.get(SHARED)
        if shared is None or RECIPE not in shared.files:
            return ()
        saves = sorted((d for n, d in directory.dirs.items() if NAME.match(n) and has_weights(d)), key=_place)
        newest = saves[-1:] if saves else []
        return tuple(self._save(d, shared.files[RECIPE] if d in newest else None) for d in saves)

    def _save(self, directory: Directory, recipe: Entry | None) -> Manifest:
        base = directory.path
        files = list(weight_files(directory, base))
        if ADAPTER in directory.files:
            files.append(ManifestFile(ADAPTER, directory.files[ADAPTER], Role.MODEL, "torch"))
        if recipe is not None:
            inside = recipe.key.startswith(f"{base}/" if base else "") and recipe.key.count(
                "/"
            ) == base.count("/") + bool(base)
            files.append(
                ManifestFile(
                    RECIPE if inside else f"../{SHARED}/{RECIPE}", recipe, Role.TRAINER_STATE, "torch"
                )
            )
        match = NAME.match(directory.name)
        return Manifest(
            path=base,
            layout=self.name,
            files=(*files, *rest_of(directory, files, base)),
            step=int(match.group(2)) if match and match.group(1) == "step" else None,
            carries=frozenset({"model", "optimizer", "config"}),
            gaps=("rng", "scheduler"),
            # A save at the end of a run, and all but the newest of older releases, are weights alone.
            documented_absent=frozenset({"optimizer", "dataloader", "trainer_state"})
            if recipe is None
            else frozenset(),
            temporary=is_temporary(directory.name),
            finished=not is_temporary(directory.name),
            series=series_of(directory.name),
        )

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        adapters = tuple(f for f in manifest.by_role(Role.MODEL) if f.name == ADAPTER)
        add_weights(
            builder, replace(manifest, files=tuple(f for f in manifest.files if f not in adapters)), files
        )
        for file in adapters:
            builder.add_model(
                as_object(_tree(files, file.name)), file.name, prefix="adapter:" if builder.model else ""
            )
        add_config(builder, files)
        add_tokenizer(builder, files)
        builder.components.setdefault("config", None)
        for file in manifest.by_role(Role.TRAINER_STATE):
            recipe = as_object(_tree(files, file.name))
            for key in ("optimizer", "opt", "optimizer_state"):
                if is_optimizer(recipe.get(key)):
                    builder.add_optimizer(recipe[key], file.name)
                elif recipe.get(key):
                    builder.components["optimizer"] = (
                        True  # one optimizer a parameter, stepped in the backward pass
                    )
            for key in ("dataloader", "dataloader_state_dict"):
                if recipe.get(key):
                    builder.add_loader(dict(items(recipe[key])), file.name)
            builder.add_counter("steps_run", recipe.get("steps_run"), file.name)
            builder.add_counter("epochs_run", recipe.get("epochs_run"), file.name, "epoch")
            builder.step = integer(recipe.get("steps_run")) or builder.step
        return builder.build()


def _place(directory: Directory) -> tuple[bool, int]:
    match = NAME.match(directory.name)
    assert match is not None
    return (match.group(1) == "step", int(match.group(2)))


def _tree(files: Mapping[str, FileFacts], name: str) -> object:
    facts = files.get(name)
    return facts.tree if facts is not None else None


LAYOUT = Torchtune()

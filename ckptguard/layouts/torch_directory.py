"""A directory of plain torch files that are one save: `model.pt`, `optimizer.pt`, `training_state.json`, a file a part.

Its layout is torch-file too. What it holds is told by the names of its files; the directory's name gives the step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from ckptguard.layouts._base import LayoutBase, is_temporary, rest_of, series_of, step_in
from ckptguard.layouts._torch_parts import (
    ENDINGS,
    OWN_ENDINGS,
    interpret_parts,
    rank_absences,
    rank_of,
    role_of,
)
from ckptguard.model import Directory, Entry, FileFacts, Manifest, ManifestFile, Pointer, Role, State
from ckptguard.ports import Resolve

# A file of such a name is a whole save, not a part of one.
SAVE = re.compile(r"^(?:ckpt|checkpoint)|best|last|latest|final|epoch|step|iter|snapshot", re.IGNORECASE)
PARTS = frozenset(
    {Role.OPTIMIZER, Role.SCHEDULER, Role.RNG, Role.TRAINER_STATE, Role.SCALER, Role.DATALOADER, Role.EMA}
)


class TorchDirectory(LayoutBase):
    name = "torch-file"
    order = 1450

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        files = [f for f in map(self._part, sorted(directory.files.items())) if f is not None]
        # What is called neither a model nor anything known may be the model, or the rest, where known parts lie beside it.
        if PARTS & {f.role for f in files}:
            files += [f for f in map(_unknown, sorted(directory.files.items())) if f is not None]
        held = {Role.MODEL if f.role is Role.BUNDLE else f.role for f in files}
        roles = [f.role for f in files if f.format != "json" and f.role is not Role.BUNDLE]
        named = step_in(directory.name) if directory.path else None
        whole = (
            Role.MODEL in held
            and PARTS & {f.role for f in files}
            and {Role.OPTIMIZER, Role.TRAINER_STATE} & {f.role for f in files}
        )
        half = named is not None and roles and set(roles) <= PARTS | {Role.MODEL}
        # Two of a kind are of two networks (`G.pth`, `D.pth`), or of two saves (`model_1.pt`, `model_2.pt`).
        single = all(
            roles.count(r) == 1 or any(f.rank is not None for f in files if f.role is r) or _differ(files, r)
            for r in roles
        )
        if not single or not (whole or half) or not directory.path:
            return ()
        base = directory.path
        return (
            Manifest(
                path=base,
                layout=self.name,
                files=(*files, *rest_of(Directory(base, directory.files, {}), files, base)),
                step=named,
                carries=frozenset({"model", "optimizer", "rng"}),
                absences=rank_absences(files),
                temporary=is_temporary(directory.name),
                finished=not is_temporary(directory.name),
                series=series_of(directory.name),
                attributes={"own_loop": True},
            ),
        )

    @staticmethod
    def _part(item: tuple[str, object]) -> ManifestFile | None:
        name, entry = item
        role = role_of(name)
        if role is Role.OTHER or step_in(name) is not None or is_temporary(name):
            return None
        if name.endswith(".safetensors") and role in (Role.MODEL, Role.EMA):
            return ManifestFile(name, entry, role, "safetensors", rank_of(name))  # type: ignore[arg-type]
        if name.lower().endswith(ENDINGS):
            format = "torch-or-text" if role in (Role.DATALOADER, Role.TRAINER_STATE) else "torch"
            return ManifestFile(name, entry, role, format, rank_of(name))  # type: ignore[arg-type]
        if name.endswith(".json") and role is Role.TRAINER_STATE and "tokenizer" not in name:
            return ManifestFile(name, entry, role, "json")  # type: ignore[arg-type]
        return None

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        return interpret_parts(manifest, files)

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        return ()


def _unknown(item: tuple[str, Entry]) -> ManifestFile | None:
    name, entry = item
    if role_of(name) is not Role.OTHER or is_temporary(name) or re.search(r"\d", name.partition(".")[0]):
        return None
    if not name.lower().endswith(OWN_ENDINGS) or SAVE.search(name):
        return None
    return ManifestFile(name, entry, Role.BUNDLE, "torch-or-text", rank_of(name))


def _differ(files: Sequence[ManifestFile], role: Role) -> bool:
    names = [series_of(f.name) for f in files if f.role is role]
    return len(set(names)) == len(names) and not any(SAVE.search(n) for n in names)


LAYOUT = TorchDirectory()

"""A directory of plain torch files that are one save: `model.pt`, `optimizer.pt`, `training_state.json`, a file a part.

Its layout is torch-file too. What it holds is told by the names of its files; the directory's name gives the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckptguard.layouts._base import LayoutBase, is_temporary, rest_of, series_of, step_in
from ckptguard.layouts._torch_parts import ENDINGS, interpret_parts, rank_absences, rank_of, role_of
from ckptguard.model import Directory, FileFacts, Manifest, ManifestFile, Pointer, Role, State
from ckptguard.ports import Resolve

PARTS = frozenset(
    {Role.OPTIMIZER, Role.SCHEDULER, Role.RNG, Role.TRAINER_STATE, Role.SCALER, Role.DATALOADER, Role.EMA}
)


class TorchDirectory(LayoutBase):
    name = "torch-file"
    order = 1450

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        files = [f for f in map(self._part, sorted(directory.files.items())) if f is not None]
        roles = [f.role for f in files if f.format != "json"]
        named = step_in(directory.name) if directory.path else None
        whole = (
            Role.MODEL in roles
            and PARTS & {f.role for f in files}
            and {Role.OPTIMIZER, Role.TRAINER_STATE} & {f.role for f in files}
        )
        half = named is not None and roles and set(roles) <= PARTS | {Role.MODEL}
        single = all(
            roles.count(r) == 1 or any(f.rank is not None for f in files if f.role is r) for r in roles
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
            return ManifestFile(name, entry, role, "torch", rank_of(name))  # type: ignore[arg-type]
        if name.endswith(".json") and role is Role.TRAINER_STATE and "tokenizer" not in name:
            return ManifestFile(name, entry, role, "json")  # type: ignore[arg-type]
        return None

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        return interpret_parts(manifest, files)

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        return ()


LAYOUT = TorchDirectory()

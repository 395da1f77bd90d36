"""Lightning's checkpoints: `epoch=E-step=S.ckpt` files, sharded directories with `meta.pt`, DeepSpeed inside `X.ckpt/`.

A file is written to a temporary place and moved, which across file systems is a copy: it can end short under its final
name. In a directory `meta.pt` comes last. `.ckpt` files of other names are recognised by their content (torch_file.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from ckptguard.formats.text import as_object
from ckptguard.layouts._base import LayoutBase, is_temporary, link_pointer, rest_of, series_of
from ckptguard.layouts._dcp import METADATA, add_dcp, dcp_absences, dcp_files, has_dcp
from ckptguard.layouts._deepspeed_files import is_tag
from ckptguard.layouts._lightning_state import CARRIES, GAPS, add_trainer, interpret_tree
from ckptguard.layouts._nested import NESTED, add_nested, nested_absences, nested_files, nested_in
from ckptguard.layouts._state import Builder
from ckptguard.model import Absence, Directory, Entry, FileFacts, Manifest, ManifestFile, Pointer, Role, State
from ckptguard.ports import Resolve

NAMED = re.compile(r"(?:^|[-_./])(?:epoch|step)=\d+.*\.ckpt$")
LAST = re.compile(r"^last(?:-v\d+)?\.ckpt$")
STEP = re.compile(r"(?:^|[-_./])step=0*(\d+)")
META = "meta.pt"


class Lightning(LayoutBase):
    name = "lightning"
    order = 800

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        if (META in directory.files and has_dcp(directory)) or (
            directory.name.endswith(".ckpt") and has_dcp(directory)
        ):
            return (self._sharded(directory),)
        if directory.name.endswith(".ckpt") and any(is_tag(sub) for sub in directory.dirs.values()):
            return (self._deepspeed(directory, resolve),)
        return tuple(self._file(e) for n, e in sorted(directory.files.items()) if _is_named(n, e))

    def _file(self, entry: Entry) -> Manifest:
        return self._manifest(
            entry.key, entry.name, (ManifestFile(entry.name, entry, Role.BUNDLE, "torch"),), one_file=True
        )

    def _sharded(self, directory: Directory) -> Manifest:
        base = directory.path
        files = dcp_files(directory, base)
        absences = dcp_absences(directory, base)
        meta = directory.files.get(META)
        if meta is not None:
            files.append(ManifestFile(META, meta, Role.TRAINER_STATE, "torch"))
        else:
            absences.append(
                Absence(
                    "incomplete-save",
                    META,
                    f"{META} is not there; Lightning writes it last, so the save did not finish",
                )
            )
        finished = meta is not None and METADATA in directory.files
        return self._manifest(
            base,
            directory.name,
            (*files, *rest_of(directory, files, base)),
            absences=tuple(absences),
            finished=finished,
        )

    def _deepspeed(self, directory: Directory, resolve: Resolve) -> Manifest:
        base = directory.path
        nested = nested_in(directory, resolve)
        files = nested_files(base, nested)
        return self._manifest(
            base,
            directory.name,
            (*files, *rest_of(directory, files, base)),
            absences=tuple(nested_absences(base, nested)),
            attributes={NESTED: tuple(nested)},
        )

    def _manifest(
        self,
        path: str,
        name: str,
        files: tuple[ManifestFile, ...],
        *,
        absences: tuple[Absence, ...] = (),
        finished: bool = True,
        one_file: bool = False,
        attributes: Mapping[str, object] | None = None,
    ) -> Manifest:
        step = STEP.search(name)
        return Manifest(
            path=path,
            layout=self.name,
            files=files,
            step=int(step.group(1)) if step else None,
            carries=CARRIES,
            gaps=GAPS,
            absences=absences,
            finished=finished and not is_temporary(name),
            temporary=is_temporary(name),
            # last.ckpt is a second save of the newest one, and best ones a choice among them: series of their own.
            series=series_of(re.sub(r"=-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", "=#", name)),
            attributes={**(attributes or {}), **({"one_file": True, "speaks": True} if one_file else {})},
        )

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        nested = manifest.attributes.get(NESTED, ())
        if nested:
            _interpret_deepspeed(builder, manifest, files)
        elif any(f.role is Role.SHARD or f.role is Role.METADATA for f in manifest.files):
            content = add_dcp(builder, files)
            builder.counters = [c for c in builder.counters if c.name == "name"]
            add_trainer(builder, as_object(_tree(files, META)), META)
            if content.index is not None and not builder.optimizers:
                builder.attributes["model_only"] = True
        else:
            for file in manifest.files:
                tree = _tree(files, file.name)
                if isinstance(tree, dict) and "state_dict" in tree:
                    interpret_tree(builder, tree, file.name)
                elif tree is not None:
                    builder.add_tree(tree, file.name)
        return builder.build()

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        found = (link_pointer(directory, n, self.name) for n in sorted(directory.files) if LAST.match(n))
        return tuple(p for p in found if p is not None)


def _is_named(name: str, entry: Entry) -> bool:
    return entry.kind == "file" and bool(LAST.match(name) or NAMED.search(name))


def _interpret_deepspeed(builder: Builder, manifest: Manifest, files: Mapping[str, FileFacts]) -> None:
    """Lightning's dictionary is the client state of every model file; its step counts the same steps as DeepSpeed's."""
    add_nested(builder, manifest, files)
    for file in manifest.by_role(Role.MODEL):
        tree = as_object(_tree(files, file.name))
        if "loops" in tree:
            own = list(builder.schedulers)
            builder.schedulers = []
            add_trainer(builder, tree, file.name)
            # One scheduler, known to both: the engine's own state of it is the one that it restores.
            builder.schedulers = own or builder.schedulers
            break


def _tree(files: Mapping[str, FileFacts], name: str) -> object:
    facts = files.get(name)
    return facts.tree if facts is not None else None


LAYOUT = Lightning()

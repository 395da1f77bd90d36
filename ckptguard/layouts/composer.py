"""Composer's checkpoints: `epE-baB-rankR.pt`, sharded `epE-baB/` directories, and the links that name the newest.

Not looked into: compressed files (`.pt.zst`, `.pt.lz4`, ...), whose content nothing here can prove. Composer's own hook
for outside validation is CHECKPOINT_VALIDATION_FUNCTION.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ckptguard.formats.text import as_object
from ckptguard.layouts._base import LayoutBase, is_temporary, link_pointer, rest_of, series_of, text_pointer
from ckptguard.layouts._composer_state import CARRIES, GAPS, NAME, holds, interpret_tree
from ckptguard.layouts._dcp import (
    add_faults,
    dcp_absences,
    dcp_files,
    has_dcp,
    is_committed,
    name_subjects,
    read_dcp,
)
from ckptguard.layouts._state import Builder
from ckptguard.model import Directory, Entry, FileFacts, Manifest, ManifestFile, Pointer, Role, State
from ckptguard.ports import Resolve

FILE = re.compile(
    r"^(?P<stem>.*ep\d+-ba\d+)(?:-rank(?P<rank>\d+))?\.(?P<ending>pt|tar|pt\.\w+|tar\.\w+|tgz)$"
)
SHARDED = re.compile(r"ep\d+-ba\d+$")
LATEST = re.compile(r"^latest(?:-rank\d+)?(?:\.pt|\.tar)?(?:\.symlink)?$")
COMPRESSED = re.compile(r"\.(?:zst|lz4|gz|bz2|xz|lzma|lzo|tgz)$")


class Composer(LayoutBase):
    name = "composer"
    order = 1150

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        if SHARDED.search(directory.name) and has_dcp(directory):
            return (self._sharded(directory),)
        saves: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
        for name, entry in sorted(directory.files.items()):
            match = FILE.match(name)
            if match and entry.kind == "file":
                saves[f"{match['stem']}.{match['ending']}"].append((int(match["rank"] or 0), entry))
        return tuple(self._file(sorted(members, key=lambda m: m[0])) for _, members in sorted(saves.items()))

    def _sharded(self, directory: Directory) -> Manifest:
        base = directory.path
        files = dcp_files(directory, base)
        return self._manifest(
            base,
            directory.name,
            (*files, *rest_of(directory, files, base)),
            absences=tuple(dcp_absences(directory, base)),
            finished=is_committed(directory),
        )

    def _file(self, members: Sequence[tuple[int, Entry]]) -> Manifest:
        first = members[0][1]
        sealed = bool(COMPRESSED.search(first.name))
        files = tuple(
            ManifestFile(e.name, e, Role.BUNDLE, "opaque" if sealed else "torch", rank) for rank, e in members
        )
        attributes = {"one_file": True, "speaks": True, "compressed": sealed}
        # What cannot be looked into cannot be said to lack anything.
        carries = frozenset[str]() if sealed else CARRIES
        return self._manifest(first.key, first.name, files, attributes=attributes, carries=carries)

    def _manifest(self, path: str, name: str, files: tuple[ManifestFile, ...], **more: object) -> Manifest:
        match = NAME.search(name)
        finished = more.pop("finished", True)
        more.setdefault("carries", CARRIES)
        return Manifest(
            path=path,
            layout=self.name,
            files=files,
            step=int(match["batch"]) if match else None,
            gaps=GAPS,
            temporary=is_temporary(name),
            finished=bool(finished) and not is_temporary(name),
            series=series_of(name),
            **more,  # type: ignore[arg-type]
        )

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        if manifest.attributes.get("compressed"):
            _say_compressed(builder, manifest)
        elif any(f.role in (Role.SHARD, Role.METADATA) for f in manifest.files):
            content = read_dcp(files)
            add_faults(builder, content)
            if content.index is not None:
                interpret_tree(builder, as_object(content.tree()), content.prefix + ".metadata")
                name_subjects(builder, content)
        else:
            for file in manifest.files:
                facts = files.get(file.name)
                tree = facts.tree if facts is not None else None
                if holds(tree):
                    interpret_tree(builder, as_object(tree), file.name)
                elif tree is not None:
                    builder.add_tree(tree, file.name, rank=file.rank)
        return builder.build()

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        names = [*directory.files, *directory.dirs]
        if not any(NAME.search(n) for n in names):
            return ()
        found = []
        for name, entry in sorted(directory.files.items()):
            if not LATEST.match(name):
                continue
            if entry.kind == "link":
                found.append(link_pointer(directory, name, self.name))
            elif name.endswith(".symlink"):
                found.append(text_pointer(directory, name, read, self.name))
        return tuple(p for p in found if p is not None)


def _say_compressed(builder: Builder, manifest: Manifest) -> None:
    """A compressed file was listed, not read: its content is neither good nor bad, and must not pass for either."""
    for file in manifest.files:
        ending = file.name.rpartition(".")[2]
        builder.problem(
            file.name,
            "unreadable",
            "",
            f"it is compressed ({ending}), so its {file.entry.size} bytes were not looked into",
            severity="info",
            effect="unknown",
            hint=f"decompress it ({ending}) into another folder and audit that, or save uncompressed",
        )
    for name in CARRIES:
        builder.components[name] = None


LAYOUT = Composer()

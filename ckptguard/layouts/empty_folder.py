"""A folder with a checkpoint's name and nothing in it: a save that was killed right after it began.

Frameworks that go by names would pick it as the latest. Object stores have no such folders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckptguard.layouts._base import LayoutBase, series_of, step_in
from ckptguard.layouts._state import Builder
from ckptguard.model import Absence, Directory, FileFacts, Manifest, State
from ckptguard.ports import Resolve

NAME = re.compile(r"^(?:tmp-)?(?:checkpoint|ckpt|step|global_step|iter|epoch)[-_]?\d+$")


class EmptyFolder(LayoutBase):
    name = "unknown"
    order = 1900

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        if not NAME.match(directory.name) or next(directory.walk(), None) is not None:
            return ()
        nothing = Absence(
            "incomplete-save",
            directory.path,
            f"{directory.path} is an empty folder: the save ended as it began",
        )
        return (
            Manifest(
                path=directory.path,
                layout=self.name,
                files=(),
                step=step_in(directory.name),
                carries=frozenset(),
                absences=(nothing,),
                finished=False,
                series=series_of(directory.name),
                attributes={"modified": directory.modified},
            ),
        )

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        return Builder(manifest).build()


LAYOUT = EmptyFolder()

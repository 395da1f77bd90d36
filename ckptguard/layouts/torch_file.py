"""One `torch.save` file a checkpoint, as plain training loops write them: any key names, any file names.

Files of one save that differ by role or rank (`model_100.pt`, `optim_100_rank0.pt`, `meta_100.json`) are one checkpoint.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckptguard.layouts._base import LayoutBase, is_temporary, link_pointer, series_of, step_in, text_pointer
from ckptguard.layouts._torch_parts import ENDINGS, interpret_parts, rank_absences, rank_of, role_of
from ckptguard.model import Directory, Entry, FileFacts, Manifest, ManifestFile, Pointer, Role, State
from ckptguard.ports import Resolve

POINTERS = (
    "latest",
    "latest.txt",
    "latest_checkpoint",
    "latest_checkpoint.txt",
    "last",
    "last.txt",
    "last_checkpoint",
    "checkpoint",
    "LATEST",
    "last_checkpoint.txt",
)
LINK = re.compile(
    r"^(latest|last|newest|current|best)([._-].*)?$|[._-](latest|last|newest|current|best)\.\w+$",
    re.IGNORECASE,
)
# Speech and audio trainers give their files no ending: `checkpoint_1000`, `g_00001000`, `do_00001000`.
BARE = re.compile(
    r"^(?:ckpt|checkpoint|model|state|snapshot|weights|gen|disc|net|g|d|do)[_-]?\d{1,12}$", re.IGNORECASE
)
SPEAKING = re.compile(
    r"ckpt|checkpoint|chkpt|snapshot|weights|model|last|best|latest|final|state", re.IGNORECASE
)


class TorchFile(LayoutBase):
    name = "torch-file"
    order = 1700

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        loose = [e for n, e in sorted(directory.files.items()) if self._is_candidate(n, e)]
        groups: dict[tuple[int, str], list[Entry]] = defaultdict(list)
        alone: list[Entry] = []
        for entry in loose:
            step = step_in(entry.name)
            split = step is not None and (
                role_of(entry.name) is not Role.OTHER or rank_of(entry.name) is not None
            )
            if split and not is_temporary(entry.name):
                groups[step, ""].append(entry)  # type: ignore[index]
            else:
                alone.append(entry)
        # What is saved in parts at one step is so at all: a step of which parts are lost is still one save.
        whole = [members for members in groups.values() if self._is_one_save(members)]
        parts = {series_of(e.name) for members in whole for e in members}
        models = [series_of(e.name) for members in whole for e in members if role_of(e.name) is Role.MODEL]
        claims = []
        for (step, _), members in sorted(groups.items()):
            if any(series_of(e.name) in parts for e in members):
                claims.append(self._several(directory, step, members, models[0]))
            else:
                alone += members
        return claims + [self._one(directory, e, alone) for e in sorted(alone, key=lambda e: e.key)]

    @staticmethod
    def _is_candidate(name: str, entry: Entry) -> bool:
        if name == "latest_train_state.pt":
            return False  # Megatron-Bridge's pointer, which is a torch file
        if (entry.kind == "link" and entry.resolved is not None) or entry.kind not in ("file", "link"):
            return False
        if entry.kind == "link":  # dangling: a pointer, not a checkpoint
            return False
        bare = name
        if is_temporary(name):
            bare = re.sub(
                r"\.(tmp|temp|part|partial|dirty|incomplete|writing)([.-]?\w*)?$|~$",
                "",
                name,
                flags=re.IGNORECASE,
            )
        return (
            bare.lower().endswith(ENDINGS) or (bool(BARE.match(bare)) and entry.size != 0)
        ) and not name.startswith("events.")

    @staticmethod
    def _is_one_save(members: Sequence[Entry]) -> bool:
        roles = {role_of(e.name) for e in members}
        ranks = [rank_of(e.name) is not None for e in members]
        return len(members) > 1 and (len(roles) == len(members) or any(ranks)) and Role.MODEL in roles

    def _one(self, directory: Directory, entry: Entry, alone: Sequence[Entry]) -> Manifest:
        name = entry.name
        series = series_of(name)
        step = step_in(name)
        speaks = (
            step is not None
            or bool(SPEAKING.search(name))
            or sum(series_of(e.name) == series for e in alone) > 1
        )
        if (
            entry.size <= 4096
            and LINK.match(name)
            and entry.size < min((e.size for e in alone if e is not entry), default=0)
        ):
            speaks = False  # a link whose store knows no links is a small file that holds the name
        return Manifest(
            path=entry.key,
            layout=self.name,
            files=(ManifestFile(name, entry, Role.BUNDLE, "torch"),),
            step=step,
            carries=frozenset({"model", "optimizer", "rng"}),
            certain=speaks and step is not None and not BARE.match(name),
            temporary=is_temporary(name),
            finished=not is_temporary(name),
            series=series,
            attributes={"one_file": True, "speaks": speaks, "bare": bool(BARE.match(name))},
        )

    def _several(self, directory: Directory, step: int, members: Sequence[Entry], series: str) -> Manifest:
        """One save in several files. `series` is that of the run's model files, whether this save still has one or not."""
        files = [ManifestFile(e.name, e, role_of(e.name), "torch", rank_of(e.name)) for e in members]
        for name, entry in sorted(directory.files.items()):
            if name.endswith(".json") and step_in(name) == step and entry.kind == "file":
                files.append(ManifestFile(name, entry, Role.TRAINER_STATE, "json"))
        main = next((f for f in files if f.role is Role.MODEL), files[0])
        return Manifest(
            path=main.entry.key,
            layout=self.name,
            files=tuple(files),
            step=step,
            carries=frozenset({"model", "optimizer", "rng"}),
            absences=rank_absences(files),
            series=series,
            attributes={"own_loop": True},
        )

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        return interpret_parts(manifest, files)

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        found = []
        for name, entry in sorted(directory.files.items()):
            if name in POINTERS:
                found.append(_by_number(directory, text_pointer(directory, name, read)))
            elif entry.kind == "link" and LINK.search(name):
                found.append(link_pointer(directory, name))
            elif LINK.search(name) and 0 < entry.size <= 512 and name.lower().endswith(ENDINGS):
                found.append(text_pointer(directory, name, read))  # a link that a copy turned into its text
        return tuple(
            replace(p, kind="best") if re.search(r"best", p.entry.name, re.IGNORECASE) else p
            for p in found
            if p is not None
        )


def _by_number(directory: Directory, pointer: Pointer | None) -> Pointer | None:
    """A pointer that says a step names the one checkpoint of that step, where there is exactly one."""
    if pointer is None or pointer.resolved is not None or not pointer.names.isdecimal():
        return pointer
    step = int(pointer.names)
    named: list[Entry | Directory] = [*directory.files.values(), *directory.dirs.values()]
    fitting = [
        e.key if isinstance(e, Entry) else e.path
        for e in named
        if (isinstance(e, Directory) or TorchFile._is_candidate(e.name, e)) and step_in(e.name) == step
    ]
    return replace(pointer, resolved=fitting[0]) if len(fitting) == 1 else pointer


LAYOUT = TorchFile()

"""What layouts share: directories from listings, names with steps, plain pointers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptguard.model import Directory, Entry, FileFacts, Manifest, ManifestFile, Pointer, Role, State
from ckptguard.ports import Resolve

OURS = ".ckptguard"
TEMPORARY = re.compile(
    r"(^|[._-])(tmp|temp|partial|incomplete|unfinished|inprogress|in-progress)([._-]|$)"
    r"|\.(tmp|temp|part|partial|dirty|incomplete|writing)([.-]?[0-9A-Za-z]{0,12})?$|^\.tmp[0-9A-Za-z_]{4,}|~$|\.orbax-checkpoint-tmp",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+")


def build_directory(entries: Iterable[Entry]) -> Directory:
    """A tree from a flat listing. What lies below `.ckptguard/` is left out."""
    root: dict[str, Any] = {"files": {}, "dirs": {}}
    for entry in entries:
        parts = entry.key.split("/")
        if OURS in parts:
            continue
        here = root
        for part in parts[:-1]:
            here = here["dirs"].setdefault(part, {"files": {}, "dirs": {}})
        if entry.kind == "directory":
            here["dirs"].setdefault(parts[-1], {"files": {}, "dirs": {}})["modified"] = entry.modified
        else:
            here["files"][parts[-1]] = entry
    return _freeze("", root, {})


def _freeze(path: str, node: Mapping[str, Any], beside: Mapping[str, Entry]) -> Directory:
    dirs = {
        name: _freeze(f"{path}/{name}" if path else name, sub, node["files"])
        for name, sub in node["dirs"].items()
    }
    return Directory(path, node["files"], dirs, beside, node.get("modified", 0.0))


def step_in(name: str) -> int | None:
    """The training step that a file or directory name states, if it states one."""
    stem = name.rsplit("/", 1)[-1]
    found = None
    for pattern in (
        r"(?:global[_-]?)?(?:step|steps|iter|iteration)[-_=.]?0*(\d+)",
        r"(?:^|[-_.])ba0*(\d+)",
        r"(?:^|[^A-Za-z])(?:ckpt|checkpoint|chkpt|chk|cp|weights|model|state|train|snapshot|save|optimizer|optim|opt|meta|scheduler|scaler|rng|ema)[-_=.]?0*(\d+)(?!\d|\.\d)(?![\d.]*(?:of|B|b|M|m)\b)",
        r"(?:^|[-_.])ema[-_]?\d?\.\d+[-_]0*(\d+)",
    ):
        match = re.search(pattern, stem, re.IGNORECASE)
        if match:
            found = int(match.group(1))
            break
    if found is None:
        whole = re.fullmatch(r"0*(\d+)(?:\.[A-Za-z]+)?", stem)
        found = int(whole.group(1)) if whole else None
    return found


def series_of(name: str) -> str:
    """The name with its numbers taken out: checkpoints of one series share it."""
    return _NUMBER.sub("#", name)


def is_temporary(name: str) -> bool:
    """Whether a name says that it is not finished."""
    return bool(TEMPORARY.search(name))


def file_of(name: str, entry: Entry, role: Role, format: str, rank: int | None = None) -> ManifestFile:
    return ManifestFile(name, entry, role, format, rank)


def rest_of(directory: Directory, taken: Iterable[ManifestFile], base: str = "") -> Iterator[ManifestFile]:
    """The files of a directory that no rule named, as plain files to be read but not parsed."""
    names = {f.entry.key for f in taken}
    for entry in directory.walk():
        if entry.key not in names and entry.kind != "directory":
            yield ManifestFile(entry.key[len(base) + 1 if base else 0 :], entry, Role.OTHER, "opaque")


class LayoutBase:
    """Defaults that most layouts keep. Subclasses set `name` and `order` and define `claim` and `interpret`."""

    name = ""
    order = 1000

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        raise NotImplementedError

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        raise NotImplementedError

    def pointers(self, directory: Directory, read: Callable[[str], bytes]) -> Sequence[Pointer]:
        return ()


def text_pointer(
    directory: Directory, name: str, read: Callable[[str], bytes], layout: str = ""
) -> Pointer | None:
    """A pointer that is a small text file naming a checkpoint beside it."""
    entry = directory.files.get(name)
    if entry is None or entry.size > 4096 or entry.kind == "other":
        return None
    if entry.kind == "link":
        return link_pointer(directory, name, layout)
    says = read(entry.key).decode("utf-8", "replace").strip()
    if not says or "\n" in says or "\0" in says:
        return Pointer(entry, "text", says[:80], None, layout)
    return Pointer(entry, "text", says, locate(directory, says), layout)


def link_pointer(directory: Directory, name: str, layout: str = "") -> Pointer | None:
    entry = directory.files.get(name)
    if entry is None or entry.kind != "link":
        return None
    return Pointer(entry, "link", entry.target or "", entry.resolved, layout)


def locate(directory: Directory, says: str) -> str | None:
    """The key of what a pointer names: as written from here, else by its last part (a moved or absolute path)."""
    for candidate in (says.removeprefix("./"), says.rstrip("/").rpartition("/")[2]):
        if not candidate or candidate in (".", ".."):
            continue
        key = f"{directory.path}/{candidate}" if directory.path else candidate
        here: Directory | None = directory
        *parents, last = candidate.strip("/").split("/")
        for part in parents:
            here = here.dirs.get(part) if here else None
        if here and (last in here.files or last in here.dirs):
            return key
    return None

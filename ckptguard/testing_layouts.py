"""The contract that every layout keeps. A test inherits it and says where a sample lies and what is in it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptguard.discover import find_checkpoints
from ckptguard.facts import Reader, Wanted
from ckptguard.formats.pickles import Opaque
from ckptguard.layouts._base import build_directory
from ckptguard.model import Directory, Entry, Evidence, FileFacts, Manifest
from ckptguard.registry import layout_named, layouts
from ckptguard.storage.local import LocalStore

JUNK: tuple[Any, ...] = (
    None,
    7,
    "text",
    [],
    {},
    [1, {2: 3}],
    {"state": 5, "param_groups": "x"},
    {"module": [], "param_shapes": 3},
    Opaque("a.B"),
    ((),),
)


class LayoutContract:
    """What every layout promises of its own samples.

    A subclass defines the fixture `sample`: a folder in which checkpoints of the layout `name` lie, and `holds`, the
    components that each of them has.
    """

    name = ""
    holds: frozenset[str] = frozenset({"model", "optimizer"})
    count = 1

    def found(self, sample: Path) -> tuple[LocalStore, list[Manifest]]:
        store = LocalStore(sample)
        return store, find_checkpoints(build_directory(store.list()), layouts())

    def test_claims_its_sample_by_names_alone(self, sample: Path) -> None:
        _, manifests = self.found(sample)
        assert [m.layout for m in manifests] == [self.name] * self.count

    def test_no_other_layout_claims_the_same_files(self, sample: Path) -> None:
        store, manifests = self.found(sample)
        root = build_directory(store.list())
        for manifest in manifests:
            place = _directory(root, manifest.path)
            if place is None:
                continue
            claimed = [
                layout.name
                for layout in layouts()
                if any(
                    m.path == manifest.path and not m.attributes.get("one_file")
                    for m in layout.claim(place, lambda d: None)
                )
            ]
            assert claimed[:1] == [self.name], f"{manifest.path} is claimed by {claimed}"

    def test_every_file_is_in_the_manifest_once(self, sample: Path) -> None:
        store, manifests = self.found(sample)
        entries = [e for e in store.list() if e.kind == "file"]
        for manifest in manifests:
            keys = [f.entry.key for f in manifest.files]
            assert len(keys) == len(set(keys))
            inside = {e.key for e in entries if e.key.startswith(f"{manifest.path}/")}
            assert inside <= set(keys), inside - set(keys)

    def test_its_content_becomes_state(self, sample: Path) -> None:
        store, manifests = self.found(sample)
        layout = layout_named(self.name)
        assert layout is not None
        with Reader(store, 1) as reader:
            for manifest in manifests:
                state = layout.interpret(manifest, reader.read(manifest, Wanted(Evidence.STRUCTURE, {})))
                held = {name for name, value in state.components.items() if value}
                assert self.holds <= held, f"{manifest.path}: {held}"
                assert not state.problems, state.problems
                assert state.step is not None

    def test_never_raises_on_any_part_of_it(self, sample: Path) -> None:
        store, manifests = self.found(sample)
        layout = layout_named(self.name)
        assert layout is not None
        with Reader(store, 1) as reader:
            for manifest in manifests[:1]:
                files = reader.read(manifest, Wanted(Evidence.STRUCTURE, {}))
                for kept in _subsets(files):
                    layout.interpret(manifest, kept)
                for junk in JUNK:
                    layout.interpret(
                        manifest, {n: FileFacts(n, Evidence.STRUCTURE, tree=junk) for n in files}
                    )
                    for name in files:
                        layout.interpret(
                            manifest, {**files, name: FileFacts(name, Evidence.STRUCTURE, tree=junk)}
                        )

    def test_never_raises_on_any_part_of_its_names(self, sample: Path) -> None:
        store, _ = self.found(sample)
        entries = [e for e in store.list() if e.kind in ("file", "directory")]
        for kept in _halves(entries):
            find_checkpoints(build_directory(kept), layouts())


def _directory(root: Directory, path: str) -> Directory | None:
    here: Directory | None = root
    for part in path.split("/") if path else ():
        here = here.dirs.get(part) if here else None
    return here


def _subsets(files: Mapping[str, FileFacts]) -> list[dict[str, FileFacts]]:
    """None, each alone, each left out, and all unread."""
    names = list(files)
    result: list[dict[str, FileFacts]] = [{}]
    result += [{n: files[n]} for n in names]
    result += [{n: files[n] for n in names if n != gone} for gone in names]
    return [*result, {n: FileFacts(n, Evidence.LISTING) for n in names}]


def _halves(entries: list[Entry]) -> list[list[Entry]]:
    result = [[e for e in entries if e is not gone] for gone in entries[:60]]
    result += [entries[::2], entries[1::2], list(itertools.islice(entries, len(entries) // 2))]
    return result

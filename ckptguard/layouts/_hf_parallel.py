"""The Trainer's checkpoints of several processes: DeepSpeed or FSDP directories beside its own files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptguard.layouts._nested import CHECKPOINT_LAYOUTS, NESTED, add_nested, count_rng_files, nested_absences
from ckptguard.layouts._state import Builder
from ckptguard.model import Absence, Directory, FileFacts, Manifest, ManifestFile, Role

LATEST = "latest"
RANK_FILE = re.compile(r"^(?P<what>pytorch_model_fsdp(?:_\d+)?|optimizer(?:_\d+)?)_rank(?P<rank>\d+)\.bin$")


def parallel_layouts(nested: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """Those of the nested layouts that hold training state of several processes."""
    return tuple(m for m in nested if m.layout in CHECKPOINT_LAYOUTS)


def parallel_files(directory: Directory) -> Iterator[ManifestFile]:
    """DeepSpeed's pointer, and FSDP's files of ranks (local state, or written without DCP)."""
    base = len(directory.path) + 1 if directory.path else 0
    for name, entry in sorted(directory.files.items()):
        match = RANK_FILE.match(name)
        if match:
            role = Role.OPTIMIZER if match["what"].startswith("optimizer") else Role.MODEL
            yield ManifestFile(entry.key[base:], entry, role, "torch", int(match["rank"]))
        elif name == LATEST:
            yield ManifestFile(entry.key[base:], entry, Role.METADATA, "text")


def parallel_absences(directory: Directory, nested: Sequence[Manifest]) -> Iterator[Absence]:
    """Nested saves that did not finish, and a DeepSpeed save whose pointer is gone: the engine would find nothing."""
    inner = parallel_layouts(nested)
    yield from nested_absences(directory.path, inner)
    tags = [m.path.rpartition("/")[2] for m in inner if m.layout == "deepspeed"]
    if tags and LATEST not in directory.files:
        hint = f"write the tag's name into it, without a line's end: printf {max(tags)} > latest"
        yield Absence(
            "missing-file", LATEST, f"{LATEST} is not there: DeepSpeed finds {max(tags)} by it alone", hint
        )


def add_parallel(builder: Builder, manifest: Manifest, files: Mapping[str, FileFacts]) -> None:
    """What the nested layouts hold, without letting their own counts overrule the trainer's."""
    nested: tuple[Manifest, ...] = manifest.attributes.get(NESTED, ())
    inner = parallel_layouts(nested)
    if not inner:
        return
    own, seen = dict(builder.model), len(builder.counters)
    add_nested(builder, replace(manifest, attributes={NESTED: inner}), files)
    builder.model |= own  # the exported weights have the names that the config speaks of
    # DeepSpeed's tag may be one step ahead of the trainer's count.
    builder.counters[seen:] = [replace(c, unit="unknown") for c in builder.counters[seen:]]
    _check_latest(builder, inner, files)
    present = frozenset(f.rank for f in manifest.by_role(Role.RNG) if f.rank is not None)
    count_rng_files(builder, manifest, present, "rng_state_{}.pth")


def _check_latest(builder: Builder, inner: Sequence[Manifest], files: Mapping[str, FileFacts]) -> None:
    tags = {m.path.rpartition("/")[2] for m in inner if m.layout == "deepspeed"}
    facts = files.get(LATEST)
    says = facts.tree.strip() if facts is not None and isinstance(facts.tree, str) else None
    if tags and says is not None and says not in tags:
        builder.problem(
            LATEST,
            "missing-file",
            "",
            f"it names {says[:80] or 'nothing'}; what is here is {', '.join(sorted(tags))}",
        )

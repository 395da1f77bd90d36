from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ckptguard.codes import finding
from ckptguard.layouts._hf import SHARD
from ckptguard.model import CheckpointFacts, Effect, Evidence, Finding, Role, Severity, Tensor
from ckptguard.ports import Subject


class WeightIndex:
    """Whether shards and their index agree.

    Finds: shards that the index names and are not there, tensors that are not where the index says, tensors and shards
    that it does not name, the same tensor in two shards, a wrong total size, shards of two saves in one directory.
    Why it matters: loaders follow the index or the folder, not both: a missing shard can load as random weights.
    Example: a model re-saved in fewer shards over the old ones.
    What to do: take the missing shard from a replica; move stale shards away.
    Blind spots: a shard replaced by one of another save with the same names needs checksums, a seal or the weights' own
    history. A wrong total alone is reported and changes nothing.
    """

    name = "weight-index"
    needs = Evidence.STRUCTURE
    codes = (
        "missing-file",
        "missing-tensor",
        "unindexed-tensor",
        "duplicate-tensor",
        "size-mismatch",
        "mixed-saves",
    )

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        for index in facts.manifest.by_role(Role.INDEX):
            known = facts.files.get(index.name)
            tree = known.tree if known is not None else None
            mapped = tree.get("weight_map") if isinstance(tree, dict) else None
            if not isinstance(tree, dict) or not isinstance(mapped, dict):
                if isinstance(tree, dict):
                    yield finding("bad-header", index.name, f"{index.name} has no weight_map")
                continue
            folder = index.name.rpartition("/")[0]
            yield from self._files(facts, index.name, folder, mapped)
            yield from self._tensors(facts, index.name, folder, mapped)
            yield from self._total(facts, index.name, folder, mapped, tree)
        yield from self._without_index(facts)

    @staticmethod
    def _files(
        facts: CheckpointFacts, index: str, folder: str, mapped: Mapping[str, Any]
    ) -> Iterator[Finding]:
        there = {f.name for f in facts.manifest.files}
        for file in sorted({_in(folder, f) for f in mapped.values()} - there):
            lost = sum(1 for f in mapped.values() if _in(folder, f) == file)
            yield finding(
                "missing-file",
                file,
                f"{index} puts {lost} of {len(mapped)} tensors into {file}, which is not there",
            )

    @staticmethod
    def _tensors(
        facts: CheckpointFacts, index: str, folder: str, mapped: Mapping[str, Any]
    ) -> Iterator[Finding]:
        files = {_in(folder, f) for f in mapped.values()}
        for name, file in mapped.items():
            known = facts.files.get(_in(folder, file))
            if known is not None and isinstance(known.tree, dict) and name not in known.tree:
                yield finding(
                    "missing-tensor",
                    f"{_in(folder, file)}:{name}",
                    f"{index} says that {name} is in {file}; it is not",
                )
        homes: dict[str, list[str]] = defaultdict(list)
        for file in sorted(files):
            known = facts.files.get(file)
            for name in known.tree if known is not None and isinstance(known.tree, dict) else ():
                homes[name].append(file)
                if name not in mapped:
                    yield finding(
                        "unindexed-tensor",
                        f"{file}:{name}",
                        f"{name} is in {file} and not in {index}: loaders that follow the index lose it",
                        severity=Severity.WARNING,
                        effect=Effect.LOSSY,
                    )
        for name, where in homes.items():
            if len(where) > 1:
                yield from _twice(facts, name, where)

    @staticmethod
    def _total(
        facts: CheckpointFacts, index: str, folder: str, mapped: Mapping[str, Any], tree: Mapping[str, Any]
    ) -> Iterator[Finding]:
        metadata = tree.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        files = {_in(folder, f) for f in mapped.values()}
        if not isinstance(total, int | float) or any(
            facts.files.get(f) is None or facts.files[f].tree is None for f in files
        ):
            return
        held = sum(t.nbytes for f in files for t in facts.files[f].tensors)
        if int(total) != held:
            yield finding(
                "size-mismatch",
                index,
                f"{index} says {int(total)} bytes in all, the shards hold {held}",
                severity=Severity.WARNING,
                effect=Effect.LOSSY if int(total) > held else Effect.NONE,
            )

    @staticmethod
    def _without_index(facts: CheckpointFacts) -> Iterator[Finding]:
        if facts.manifest.attributes.get("format") == "safetensors-shards":
            return  # each rank numbers the files that it wrote; no index belongs to them
        indexes = facts.manifest.by_role(Role.INDEX)
        named: set[str] = set()
        for index in indexes:
            known = facts.files.get(index.name)
            mapped = (
                known.tree.get("weight_map") if known is not None and isinstance(known.tree, dict) else None
            )
            named |= (
                {_in(index.name.rpartition("/")[0], f) for f in mapped.values()}
                if isinstance(mapped, dict)
                else set()
            )
        counts: dict[tuple[str, str], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for file in facts.manifest.by_role(Role.MODEL):
            match = SHARD.match(file.name.rpartition("/")[2])
            if match:
                counts[file.name.rpartition("/")[0], match["stem"]][int(match["count"])].append(file.name)
        for (folder, stem), by_count in counts.items():
            if len(by_count) > 1:
                words = " and ".join(f"of {n}: {len(f)}" for n, f in sorted(by_count.items()))
                covered = all(f in named for n, files in by_count.items() if len(by_count) > 1 for f in files)
                stale = [f for files in by_count.values() for f in files if f not in named]
                yield finding(
                    "mixed-saves",
                    (stale or [stem])[0],
                    f"{_in(folder, stem)}: shards of two saves lie in one directory ({words})",
                    severity=None if covered or not named else Severity.WARNING,
                    effect=None if covered or not named else Effect.LOSSY,
                )
            if not indexes:
                count = max(by_count)
                numbers = {
                    int(m["index"]) for f in by_count[count] if (m := SHARD.match(f.rpartition("/")[2]))
                }
                for missing in sorted(set(range(1, count + 1)) - numbers):
                    lost = f"{stem}-{missing:05d}-of-{count:05d}"
                    yield finding(
                        "missing-file", _in(folder, lost), f"shard {missing} of {count} is not there"
                    )
                if numbers == set(range(1, count + 1)) and count > 1:
                    yield finding(
                        "missing-file",
                        _in(folder, f"{stem}.index.json"),
                        "the shards have no index, which is written last: the save was cut short",
                    )


def _in(folder: str, file: Any) -> str:
    return f"{folder}/{file}" if folder else str(file)


def _twice(facts: CheckpointFacts, name: str, where: list[str]) -> Iterator[Finding]:
    tensors = [t for f in where if isinstance(t := facts.files[f].tree.get(name), Tensor)]
    digests = {t.facts.digest for t in tensors if t.facts is not None}
    same = len(digests) == 1 and all(t.facts is not None for t in tensors)
    unknown = any(t.facts is None for t in tensors)
    yield finding(
        "duplicate-tensor",
        f"{where[1]}:{name}",
        f"{name} is in {' and in '.join(where)}{', with the same bytes' if same else ''}",
        severity=Severity.INFO if same else Severity.WARNING if unknown else None,
        effect=Effect.NONE if same or unknown else None,
    )


CHECK = WeightIndex()

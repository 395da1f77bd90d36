"""What a distributed checkpoint holds: its chunks put together again by our own reader, which executes no pickle.

Nothing of it goes through torch's own loader: that one would unpickle every item that is no tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptguard.codes import CODES
from ckptguard.errors import CkptguardError
from ckptguard.formats import dcp_items, parse
from ckptguard.formats._base import Source
from ckptguard.formats.dcp_metadata import Chunk, Index
from ckptguard.layouts._dcp import top_weights
from ckptguard.layouts._dcp_content import read_dcp
from ckptguard.model import Evidence, FileFacts, Severity, Tensor
from ckptguard.restore.components import components_of, without
from ckptguard.restore.held import METADATA, Held, Place, Refused, raw_elements
from ckptguard.restore.streams import find_streams
from ckptguard.values import itemsize


class HeldDcp(Held):
    """One directory of shards as one state dictionary."""

    def _find(self) -> dict[str, Place]:
        self._parts: dict[int, list[tuple[Chunk, str, Tensor]]] = {}
        self._trees[METADATA] = self._read()
        return {c: Place((METADATA,), path) for c, path in components_of(self._trees[METADATA]).items()}

    def _read(self) -> dict[Any, Any]:
        try:
            size = self.store.stat(METADATA).size
            metadata = parse(self.store, METADATA, size, "dcp-metadata")
            if not isinstance(metadata.tree, Index):
                raise Refused(f"{METADATA}: it holds no index")
            files = {METADATA: FileFacts(METADATA, Evidence.CONTENT, tree=metadata.tree)}
            for shard in metadata.tree.items:
                source = Source(self.store, shard, self.store.stat(shard).size, deep=True)
                parsed = dcp_items.read(source, shard, {METADATA: metadata})
                bad = next(
                    (
                        p
                        for p in parsed.problems
                        if p.severity in ("", Severity.ERROR) and CODES[p.code].severity is Severity.ERROR
                    ),
                    None,
                )
                if bad is not None:
                    raise Refused(f"{shard}: {bad.message}")
                files[shard] = FileFacts(
                    shard, Evidence.CONTENT, kind=parsed.kind, tree=parsed.tree, details=parsed.details
                )
        except Refused:
            raise
        except (CkptguardError, KeyError) as error:
            raise Refused(f"{self.root.name}: {error}") from error
        content = read_dcp(files)
        for name, entry in metadata.tree.tensors.items():
            held = [
                (chunk, shard, facts.details["chunks"][name, chunk.offsets])
                for chunk in entry.chunks
                for shard, facts in files.items()
                if (name, chunk.offsets) in facts.details.get("chunks", {})
            ]
            self._parts[id(content.tensors[name])] = held
        tree = content.tree()
        weights = top_weights(tree)
        if weights and "model" not in components_of(tree):
            # torchtitan keeps the weights beside the other parts, under their own names.
            tree = {**{key: value for key, value in tree.items() if key not in weights}, "model": weights}
        return tree

    def _load(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._materialise(name)
        return self._loaded[name]

    def streams(self) -> dict[str, Any]:
        tree = self._load(METADATA)
        paths = [
            place.path for name, place in self.places.items() if not name.startswith("rng") and place.path
        ]
        return find_streams(without(tree, paths))

    def raw(self, name: str, tensor: Tensor) -> bytes | None:
        """The elements of all chunks, each at its place."""
        parts = self._parts.get(id(tensor))
        if parts is None or 0 in tensor.shape:
            return raw_elements(self.store, name, tensor)
        width = itemsize(tensor.dtype)
        if not width or sum(chunk.numel for chunk, _, _ in parts) < tensor.numel:
            return None
        whole = np.empty(tensor.shape, np.dtype(f"V{width}"))
        for chunk, shard, part in parts:
            raw = raw_elements(self.store, shard, part)
            if raw is None:
                return None
            box = tuple(slice(at, at + extent) for at, extent in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = np.frombuffer(raw, whole.dtype).reshape(chunk.sizes)
        return whole.tobytes()

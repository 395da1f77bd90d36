"""What a checkpoint holds, read twice: by our own reader, which executes nothing, and as live tensors for loading.

Runs in the child process. The first is what restored objects are compared with: a loader cannot agree with itself.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from ckptguard.digest import tensor_digest
from ckptguard.errors import CkptguardError, FormatError
from ckptguard.formats import decode, parse
from ckptguard.formats.pickles import Opaque
from ckptguard.model import Tensor
from ckptguard.ports import Store
from ckptguard.restore.components import Path, component_of_file, components_of, pick, without
from ckptguard.restore.leaves import Leaf, saved_leaves
from ckptguard.restore.leaves import Path as LeafPath
from ckptguard.restore.streams import find_streams
from ckptguard.storage.local import LocalStore
from ckptguard.values import itemsize

METADATA = ".metadata"
"""The index of a distributed checkpoint, which stands for all its shards."""


MAPPED = 1 << 30


def rank() -> int:
    """The rank of this process where a launcher started several."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


class Refused(CkptguardError):
    """The checkpoint cannot be read or loaded as it is: the checkpoint's fault, not the recipe's."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a component lies: in which files, and under which key of their content. Several files are shards."""

    files: tuple[str, ...]
    path: Path = ()


def open_checkpoint(path: str) -> Held:
    """What lies at a local path, however it is laid out. Raises Refused."""
    if (FilePath(path) / METADATA).is_file():
        from ckptguard.restore.held_dcp import HeldDcp

        return HeldDcp(path)
    return Held(path)


class Held:
    """The content of one local checkpoint, by component. Files are opened read-only, and only when asked for."""

    def __init__(self, checkpoint: str) -> None:
        self.root = FilePath(checkpoint)
        self.is_file = self.root.is_file()
        self.store: Store = LocalStore(self.root.parent if self.is_file else self.root)
        self._trees: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}
        self._generators: list[str] = []
        self.places = self._find()

    # --- finding ------------------------------------------------------------------------------------------

    def _find(self) -> dict[str, Place]:
        if self.is_file:
            name = self.root.name
            return {c: Place((name,), path) for c, path in components_of(self.tree(name)).items()}
        found: dict[str, list[str]] = {}
        for name in sorted(p.name for p in self.root.iterdir() if p.is_file()):
            component = component_of_file(name)
            if component:
                found.setdefault(component, []).append(name)
        self._generators = sorted(found.get("rng", ()), key=lambda name: (len(name), name))
        places = {component: Place(tuple(self._preferred(names))) for component, names in found.items()}
        return {c: self._inside(place) for c, place in places.items()}

    def _preferred(self, names: list[str]) -> list[str]:
        """Of the same weights in two formats, the one that loaders prefer; of one file and shards, what the index names."""
        safe = [name for name in names if name.endswith(".safetensors")]
        chosen = safe or names
        shards = [name for name in chosen if "-of-" in name]
        return shards if shards and len(shards) == len(chosen) else [n for n in chosen if n not in shards][:1]

    def _inside(self, place: Place) -> Place:
        """A file of its own may hold the state under a key again ({"optimizer": {...}})."""
        tree = self.tree(place.files[0])
        if len(place.files) == 1 and isinstance(tree, Mapping) and len(tree) == 1:
            (key,) = tree
            if component_of_file(f"{key}.pt") and isinstance(tree[key], Mapping):
                return Place(place.files, (key,))
        return place

    @property
    def known(self) -> frozenset[str]:
        """The files that were read so far."""
        return frozenset(self._trees)

    # --- reading without executing ------------------------------------------------------------------------

    def tree(self, name: str) -> Any:
        """A file's content by our own reader. Raises Refused."""
        if name not in self._trees:
            kind = "safetensors" if name.endswith(".safetensors") else "torch"
            try:
                size = self.store.stat(name).size
                parsed = parse(self.store, name, size, kind)
            except (FormatError, CkptguardError) as error:
                raise Refused(f"{name}: {error.message}") from error
            self._trees[name] = parsed.tree
        return self._trees[name]

    def saved(self, component: str) -> Any:
        """The component's content: a tree with Tensor descriptions in place of numbers."""
        place = self.places[component]
        if len(place.files) == 1:
            return pick(self.tree(place.files[0]), place.path)
        return {key: value for name in place.files for key, value in self.tree(name).items()}

    def leaves(self, component: str) -> dict[LeafPath, Leaf]:
        """Everything the checkpoint holds of the component, comparable."""
        place = self.places[component]
        found: dict[LeafPath, Leaf] = {}
        for name in place.files:
            tree = pick(self.tree(name), place.path)
            prefix = ".".join(str(key) for key in place.path)
            subject = f"{name}:{prefix}" if prefix else name
            found.update(saved_leaves(tree, subject, partial(self._digest, name)))
        return found

    def raw(self, name: str, tensor: Tensor) -> bytes | None:
        """A tensor's elements in order, as they lie in the file; None where it holds none of its own."""
        return raw_elements(self.store, name, tensor)

    def numbers(self, name: str, tensor: Tensor) -> np.ndarray | None:
        """A tensor's values, for saying how far two of them lie apart."""
        raw = self.raw(name, tensor)
        return None if raw is None else decode(raw, tensor.dtype, tensor.shape)

    def _digest(self, name: str, tensor: Tensor) -> str | None:
        raw = self.raw(name, tensor)
        return None if raw is None else tensor_digest(raw)

    # --- loading ------------------------------------------------------------------------------------------

    def loaded(self, component: str) -> Any:
        """The component as live tensors on the CPU. Raises Refused."""
        place = self.places[component]
        if len(place.files) == 1:
            return pick(self._load(place.files[0]), place.path)
        return {key: value for name in place.files for key, value in self._load(name).items()}

    def _load(self, name: str) -> Any:
        if name not in self._loaded:
            path = self.root if self.is_file else self.root / name
            try:
                self._loaded[name] = _load_file(path)
            except Exception as error:
                if not _is_refusal(error):
                    raise Refused(f"{name}: {_first_line(error)}") from error
                # It names classes that torch will not build unasked. Numbers and containers are taken from our own
                # reader, which builds nothing else.
                self._loaded[name] = self._materialise(name)
        return self._loaded[name]

    def _materialise(self, name: str) -> Any:
        import torch

        def build(value: Any) -> Any:
            if isinstance(value, Tensor):
                raw = self.raw(name, value)
                if raw is None and value.location != "meta":
                    raise Refused(f"{name}: the file holds no bytes for {value.name}")
                if raw is None:
                    return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
                flat = (
                    torch.frombuffer(bytearray(raw), dtype=getattr(torch, value.dtype))
                    if raw
                    else torch.empty(0)
                )
                return flat.to(getattr(torch, value.dtype)).reshape(value.shape)
            if isinstance(value, Opaque):
                return value
            if isinstance(value, Mapping):
                return {key: build(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return type(value)(build(item) for item in value)
            return value

        return build(self.tree(name))

    @property
    def optimizer_form(self) -> str:
        """How the optimizer's state is kept: numbered (as the optimizer itself gives it), named (by the parameters'
        names, as torch's get_state_dict gives it), or flat (the same, each value under one long key)."""
        tree = self.saved("optimizer") if "optimizer" in self.places else {}
        if not isinstance(tree, Mapping):
            return "numbered"
        state = tree.get("state")
        if state is None and any(str(key).startswith("state.") for key in tree):
            return "flat"
        named = isinstance(state, Mapping) and bool(state) and not any(str(key).isdecimal() for key in state)
        return "named" if named else "numbered"

    def release(self) -> None:
        """Forget the live tensors, so that only what was restored remains in memory."""
        self._loaded.clear()

    # --- random generators and counters -------------------------------------------------------------------

    def streams(self) -> dict[str, Any]:
        """The states of the random generators that the checkpoint holds; {} where it holds none."""
        if self.is_file:
            tree = self._load(self.root.name)
            paths = [place.path for name, place in self.places.items() if name != "rng" and place.path]
            return find_streams(without(tree, paths))
        if not self._generators:
            return {}
        # One file a process: where there are fewer of them than processes, the last is shared.
        mine = self._generators[min(rank(), len(self._generators) - 1)]
        return find_streams({"rng": self._load(mine)})

    def trainer_state(self) -> Mapping[str, Any]:
        """The Trainer's own progress, {} where there is none or it cannot be read."""
        path = self.root / "trainer_state.json"
        try:
            state = json.loads(path.read_bytes()) if not self.is_file and path.is_file() else {}
        except ValueError:
            return {}
        return state if isinstance(state, dict) else {}

    def components(self) -> Iterator[str]:
        """The components that hold a state of their own (random generators are handled apart)."""
        return (name for name in self.places if name != "rng")


def raw_elements(store: Store, name: str, tensor: Tensor) -> bytes | None:
    """A tensor's elements in order, as raw bytes; None where the file holds none of its own. Raises Refused."""
    if 0 in tensor.shape:
        return b""
    width = itemsize(tensor.dtype)
    if tensor.start is None or not width:
        if tensor.value is None:
            return None
        return np.ascontiguousarray(tensor.value).tobytes()
    raw = store.read(name, tensor.start, tensor.nbytes)
    if tensor.contiguous or tensor.strides is None:
        return raw
    flat = np.frombuffer(raw, np.dtype(f"u{width}") if width <= 8 else np.dtype("V16"))
    steps = tuple(stride * width for stride in tensor.strides)
    view = np.lib.stride_tricks.as_strided(flat, tensor.shape, steps, writeable=False)
    return np.ascontiguousarray(view).tobytes()


def _load_file(path: FilePath) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    import torch

    # A large file is mapped, so that what is loaded from it is in memory once.
    mapped = path.stat().st_size >= MAPPED and zipfile.is_zipfile(path)
    with torch.serialization.safe_globals(_harmless()):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _harmless() -> list[Any]:
    """Plain containers and numpy arrays, which states of random generators and counters are made of."""
    from collections import Counter, OrderedDict, defaultdict, deque

    dtypes = {type(np.dtype(kind)) for kind in ("u1", "u4", "u8", "i4", "i8", "f4", "f8", "?")}
    core: Any = np.__dict__.get("_core") or np.__dict__["core"]
    multiarray = core.multiarray
    return [
        np.ndarray, np.dtype, *dtypes, multiarray._reconstruct, multiarray.scalar, OrderedDict, Counter, defaultdict, deque,
    ]  # fmt: skip


def _is_refusal(error: Exception) -> bool:
    """Whether torch refused to build a class, which says nothing against the bytes."""
    import pickle

    return isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error).lower()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

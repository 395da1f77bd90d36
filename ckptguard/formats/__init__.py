"""Containers, one a file: how bytes become tensors. No framework is known here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ckptguard.errors import FormatError
from ckptguard.formats._base import Parsed, Source, decode
from ckptguard.formats._base import load_array as _load
from ckptguard.model import Tensor
from ckptguard.ports import Store

__all__ = ["LATE_READERS", "READERS", "Parsed", "Source", "decode", "load_array", "parse", "sniff"]


def sniff(head: bytes) -> str:
    """What a file is by its first 512 bytes: torch-zip, torch-legacy, safetensors, pickle, tar, zstd, json, zeros, or "" ."""
    from ckptguard.formats.torch_legacy import HEAD

    if head.startswith(b"PK\x03\x04"):
        return "torch-zip"
    if head.startswith(HEAD):
        return "torch-legacy"
    if head[257:262] == b"ustar":
        return "tar"
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd"
    if len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 40:
        return "safetensors"
    if len(head) >= 2 and head[0] == 0x80 and head[1] <= 5:
        return "pickle"
    if head[:1] in (b"{", b"["):
        return "json"
    if head and not head.strip(b"\0"):
        return "zeros"
    return ""


def _torch(source: Source) -> Parsed:
    """Any file that torch.load would open, with the pickles inside its byte values."""
    from ckptguard.formats._nested import with_nested

    return with_nested(_torch_by_head(source))


def _torch_by_head(source: Source) -> Parsed:
    """Any file that torch.load would open, by its first bytes."""
    head = source.read(0, min(512, source.size))
    kind = sniff(head)
    if kind == "torch-zip":
        from ckptguard.formats import torch_zip

        return torch_zip.read(source)
    if kind == "torch-legacy":
        from ckptguard.formats import torch_legacy

        return torch_legacy.read(source)
    if kind == "safetensors":
        from ckptguard.formats import safetensors

        return safetensors.read(source)
    if kind == "pickle":
        from ckptguard.formats import bare_pickle

        return bare_pickle.read(source)
    if kind == "tar":
        from ckptguard.formats import torch_tar

        return torch_tar.read(source)
    what = {"zeros": "begins with zeros", "zstd": "is compressed with zstd", "json": "is JSON"}.get(
        kind, "begins like no container that torch reads"
    )
    raise FormatError(
        "bad-header", f"the file of {source.size} bytes {what} (first bytes {head[:8].hex(' ')})"
    )


def _safetensors(source: Source) -> Parsed:
    from ckptguard.formats import safetensors

    return safetensors.read(source)


def _json(source: Source) -> Parsed:
    from ckptguard.formats import text

    return text.read_json(source)


def _text(source: Source) -> Parsed:
    from ckptguard.formats import text

    return text.read_text(source)


NOTE = 4096  # bytes of the longest note that is not read as a torch file


def _torch_or_text(source: Source) -> Parsed:
    """A torch file, or a short note in plain text under such a name, as SpeechBrain's `counter.ckpt`."""
    head = source.read(0, min(NOTE, source.size))
    note = source.size <= NOTE and not head.startswith((b"version https://git-lfs", b"<"))
    if note and not sniff(head[:512]) and head.isascii() and head.decode().isprintable() | (b"\n" in head):
        return Parsed("text")
    return _torch(source)


def _pickle(source: Source) -> Parsed:
    from ckptguard.formats import bare_pickle
    from ckptguard.formats._nested import with_nested

    return with_nested(bare_pickle.read(source))


def _dcp_metadata(source: Source) -> Parsed:
    from ckptguard.formats import dcp_metadata

    return dcp_metadata.read(source)


def _dcp_shard(source: Source, name: str, known: Mapping[str, Parsed]) -> Parsed:
    from ckptguard.formats import dcp_items

    return dcp_items.read(source, name, known)


def _ocdbt(source: Source) -> Parsed:
    from ckptguard.formats import ocdbt

    return ocdbt.read(source)


READERS: dict[str, Callable[[Source], Parsed]] = {
    "torch": _torch,
    "torch-or-text": _torch_or_text,
    "safetensors": _safetensors,
    "json": _json,
    "text": _text,
    "pickle": _pickle,
    "ocdbt": _ocdbt,
    "dcp-metadata": _dcp_metadata,
}

# Readers that need what other files of the same checkpoint hold (a shard whose index is elsewhere): they come second and
# get the file's name and everything that was read before.
LATE_READERS: dict[str, Callable[[Source, str, Mapping[str, Parsed]], Parsed]] = {"dcp-shard": _dcp_shard}


def parse(store: Store, key: str, size: int, format: str) -> Parsed:
    """Read the structure of one file, without executing or loading it. Raises FormatError, StoreError."""
    return READERS[format](Source(store, key, size))


def load_array(store: Store, key: str, size: int, tensor: Tensor) -> np.ndarray:
    """One tensor's numbers; bfloat16 and fp8 come as float32, exactly. Raises FormatError, StoreError."""
    return _load(Source(store, key, size), tensor)

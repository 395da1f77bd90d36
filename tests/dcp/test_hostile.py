"""Metadata and shards of any content: findings, never a crash, and no work out of proportion."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptguard.errors import FormatError
from ckptguard.formats import LATE_READERS, READERS, Source
from ckptguard.formats._base import Parsed
from ckptguard.model import Resume, RunReport
from ckptguard.storage.local import LocalStore

pytestmark = pytest.mark.dcp
Look = Callable[..., RunReport]
Copy = Callable[[Path], Path]


def mutated(raw: bytes, chance: random.Random) -> bytes:
    """The bytes with a few of them changed, cut out, doubled or cut off."""
    data = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data))
        match chance.randrange(5):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at : at + chance.randint(1, 16)] = bytes(chance.randrange(256) for _ in range(8))
            case 2:
                del data[at : at + chance.randint(1, 64)]
            case 3:
                data[at:at] = data[at : at + chance.randint(1, 64)]
            case _:
                data[at : at + 8] = (1 << chance.randrange(63)).to_bytes(8, "little")
    return bytes(data)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_mutations_give_findings_and_no_crash(file: str, dcp_runs: Path, tmp_path: Path) -> None:
    """The readers raise FormatError or return; nothing else, whatever the bytes."""
    folder = dcp_runs / "fsdp2" / "save_4"
    chance = random.Random(f"dcp {file}")
    metadata, shard = (folder / ".metadata").read_bytes(), (folder / "__0_0.distcp").read_bytes()
    store = LocalStore(tmp_path)
    good = READERS["dcp-metadata"](Source(LocalStore(folder), ".metadata", len(metadata)))
    for _ in range(150):
        known: Parsed = good
        if file == ".metadata":
            raw = mutated(metadata, chance)
            (tmp_path / "m").write_bytes(raw)
            try:
                known = READERS["dcp-metadata"](Source(store, "m", len(raw)))
            except FormatError:
                continue
            finally:
                store.forget()
            raw = shard
        else:
            raw = mutated(shard, chance)
        (tmp_path / "s").write_bytes(raw)
        try:
            parsed = LATE_READERS["dcp-shard"](
                Source(store, "s", len(raw), deep=True), "__0_0.distcp", {".metadata": known}
            )
            assert all(span.start >= 0 and span.start + span.length <= len(raw) for span in parsed.spans)
            assert all(t.start is None or t.start + t.nbytes <= len(raw) for t in parsed.tensors)
        except FormatError:
            pass
        finally:
            store.forget()


def test_an_audit_of_mutations_never_fails_itself(dcp_runs: Path, copied: Copy, look: Look) -> None:
    run = copied(dcp_runs / "fsdp2")
    chance = random.Random(5)
    folder = run / "save_4"
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}
    for _ in range(25):
        name = chance.choice(sorted(whole))
        (folder / name).write_bytes(mutated(whole[name], chance))
        found = look(run).checkpoints[-1]
        assert "check-failed" not in {f.code for f in found.findings}, [f.message for f in found.findings]
        (folder / name).write_bytes(whole[name])
    assert look(run).checkpoints[-1].resume is Resume.EXACT


def hostile(state: dict[str, Any]) -> bytes:
    """A `.metadata` with any fields, from DCP's own classes."""
    from torch.distributed.checkpoint.metadata import Metadata

    metadata = Metadata.__new__(Metadata)
    metadata.__dict__.update(state)
    return pickle.dumps(metadata)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"state_dict_metadata": {}, "storage_data": {}},
        {"state_dict_metadata": {"a": 1}, "storage_data": {}},
        {"state_dict_metadata": {}, "storage_data": {"a": "b"}},
        {"state_dict_metadata": [1, 2], "storage_data": None},
        {"state_dict_metadata": {}, "storage_data": {}, "planner_data": [1], "storage_meta": 3},
    ],
)
def test_odd_metadata_is_a_finding(state: dict[str, Any], dcp_runs: Path, copied: Copy, look: Look) -> None:
    run = copied(dcp_runs / "fsdp2")
    (run / "save_4" / ".metadata").write_bytes(hostile(state))
    found = look(run).checkpoints[-1]
    assert found.resume is Resume.UNSAFE
    assert "check-failed" not in {f.code for f in found.findings}


def test_claims_of_terabytes_cost_nothing(dcp_runs: Path, copied: Copy, look: Look) -> None:
    """Shapes and places that would need terabytes, and a tensor of a million chunks that all overlap."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    run = copied(dcp_runs / "fsdp2")
    metadata = pickle.loads((run / "save_4" / ".metadata").read_bytes())  # noqa: TID251 - our own file
    entry = metadata.state_dict_metadata["model.up.weight"]
    entry.size = torch.Size((1 << 40, 1 << 18))
    entry.chunks = [
        ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((1 << 40, 1 << 18))) for _ in range(2000)
    ]
    (run / "save_4" / ".metadata").write_bytes(pickle.dumps(metadata))
    start = time.monotonic()
    assert look(run).checkpoints[-1].resume is Resume.UNSAFE
    assert time.monotonic() - start < 20

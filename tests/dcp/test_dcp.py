"""Healthy DCP runs are silent, and every damage is seen where it is."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptguard.discover import find_checkpoints
from ckptguard.facts import Reader, Wanted
from ckptguard.formats.dcp_metadata import Index, Item
from ckptguard.inspect import Options, preflight
from ckptguard.layouts._base import build_directory
from ckptguard.layouts._dcp import read_dcp
from ckptguard.model import Evidence, Resume, RunReport, Severity, Verdict
from ckptguard.ports import Traits
from ckptguard.registry import layouts
from ckptguard.storage._wrapper import Wrapper
from ckptguard.storage.local import LocalStore
from ckptguard.testing_damage import append, drop, empty, flip, truncate

pytestmark = pytest.mark.dcp
Look = Callable[..., RunReport]
Judge = Callable[..., Verdict]
Copy = Callable[[Path], Path]

RESUMABLE = ("fsdp2", "replicated", "threads", "file-an-item", "no-collectives", "background", "compressed")
LOSSY = ("weights", "safetensors", "huggingface", "flattened")


def codes(verdict: Verdict, least: Severity = Severity.WARNING) -> set[str]:
    return {f.code for f in verdict.findings if f.severity >= least}


# --- healthy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [Evidence.LISTING, Evidence.STRUCTURE, Evidence.CONTENT])
def test_healthy_runs_are_silent(dcp_runs: Path, look: Look, depth: Evidence) -> None:
    for name in (*RESUMABLE, *LOSSY):
        report = look(dcp_runs / name, depth)
        assert [v.step for v in report.checkpoints] == [2, 4]
        assert not [f for f in report.findings if f.loud], name
        assert not [f for v in report.checkpoints for f in v.findings if f.loud], name
        if depth is not Evidence.LISTING:
            wanted = Resume.EXACT if name in RESUMABLE else Resume.LOSSY
            assert {v.resume for v in report.checkpoints} == {wanted}, name


def test_every_byte_of_every_item_is_accounted_for(dcp_runs: Path, facts_of: Callable[..., Any]) -> None:
    """Payloads by their CRC, all else by comparing the archive's structure with itself: nothing in between."""
    facts = facts_of(dcp_runs / "fsdp2" / "save_4")
    for name, file in facts.items():
        if name.endswith(".distcp"):
            assert file.bytes_proven == file.checksummed > 0
            assert not file.problems


def test_joined_chunks_have_the_facts_of_the_whole_tensor(
    dcp_runs: Path, facts_of: Callable[..., Any], tmp_path: Path
) -> None:
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(dcp_runs / "fsdp2" / "save_4", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
    content = read_dcp(facts_of(dcp_runs / "fsdp2" / "save_4"))
    for name, tensor in whole.items():
        mine = content.tensors[f"model.{name}"]
        assert mine.shape == tuple(tensor.shape)
        if tensor.numel() > 1:
            assert mine.facts is not None
            assert mine.facts.norm == pytest.approx(tensor.double().norm().item(), rel=1e-5)
            assert (mine.facts.minimum, mine.facts.maximum) == (tensor.min().item(), tensor.max().item())


# --- damage -------------------------------------------------------------------------------------------


def first_item(folder: Path, shard: str, what: Callable[[Item], bool]) -> Item:
    from ckptguard.formats import parse

    index = parse(LocalStore(folder), ".metadata", (folder / ".metadata").stat().st_size, "dcp-metadata").tree
    assert isinstance(index, Index)
    return next(i for i in index.items[shard] if what(i))


def flip_payload(folder: Path) -> None:
    """A bit in the middle of the first item's tensor."""
    item = first_item(folder, "__0_0.distcp", lambda i: i.name == "model.embed.weight")
    raw = (folder / "__0_0.distcp").read_bytes()[item.offset : item.end]
    flip(folder / "__0_0.distcp", item.offset + raw.index(b"data/0FB") + 120)


def flip_structure(folder: Path) -> None:
    """A bit in an item's local header."""
    item = first_item(folder, "__0_0.distcp", lambda i: i.name == "model.up.weight")
    flip(folder / "__0_0.distcp", item.offset + 1)


def flip_directory(folder: Path) -> None:
    item = first_item(folder, "__0_0.distcp", lambda i: i.name == "model.up.weight")
    flip(folder / "__0_0.distcp", item.end - 100)


def lose_shard(folder: Path) -> None:
    drop(folder / "__1_0.distcp")


def half_committed(folder: Path) -> None:
    (folder / ".metadata").rename(folder / ".metadata.tmp")


def stray_shard(folder: Path) -> None:
    """A shard of an earlier save with more ranks."""
    (folder / "__7_0.distcp").write_bytes((folder / "__1_0.distcp").read_bytes())


def saved_into_again(folder: Path) -> None:
    """Metadata from an hour before the data: the later save into this directory did not finish."""
    at = (folder / "__0_0.distcp").stat().st_mtime - 7200
    os.utime(folder / ".metadata", (at, at))


def other_step(folder: Path) -> None:
    """One rank's shard is that of the earlier save; same sizes and offsets, so that everything loads."""
    (folder / "__1_0.distcp").write_bytes((folder.parent / "save_2" / "__1_0.distcp").read_bytes())


def edit_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: TID251 - our own file
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def hole(folder: Path) -> None:
    def change(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["model.up.weight"].chunks
        lost = chunks.pop()
        for key in [
            k for k in metadata.storage_data if k.fqn == "model.up.weight" and k.offset == lost.offsets
        ]:
            del metadata.storage_data[key]

    edit_metadata(folder, change)


def overlap(folder: Path) -> None:
    import torch

    def change(metadata: Any) -> None:
        first = metadata.state_dict_metadata["model.up.weight"].chunks[0]
        first.sizes = torch.Size((first.sizes[0] + 1, first.sizes[1]))

    edit_metadata(folder, change)


def unplaced(folder: Path) -> None:
    def change(metadata: Any) -> None:
        for key in [k for k in metadata.storage_data if k.fqn == "model.down.weight"]:
            del metadata.storage_data[key]

    edit_metadata(folder, change)


def beyond(folder: Path) -> None:
    def change(metadata: Any) -> None:
        key = next(k for k in metadata.storage_data if k.fqn == "model.down.weight")
        metadata.storage_data[key] = replace(metadata.storage_data[key], offset=10_000_000)

    edit_metadata(folder, change)


def other_dtype(folder: Path) -> None:
    import torch

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["model.down.weight"]
        entry.properties = replace(entry.properties, dtype=torch.bfloat16)

    edit_metadata(folder, change)


def other_shape(folder: Path) -> None:
    """The chunks' two dimensions are swapped: as many bytes, another tensor."""
    import torch

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["model.down.weight"]
        entry.size = torch.Size(reversed(entry.size))
        for chunk in entry.chunks:
            old = chunk.offsets
            chunk.offsets, chunk.sizes = (
                torch.Size(reversed(chunk.offsets)),
                torch.Size(reversed(chunk.sizes)),
            )
            for key in [k for k in metadata.storage_data if k.fqn == "model.down.weight" and k.offset == old]:
                metadata.storage_data[replace(key, offset=chunk.offsets)] = metadata.storage_data.pop(key)

    edit_metadata(folder, change)


DAMAGE: dict[str, tuple[Callable[[Path], None], set[str], str]] = {
    "bit in a payload": (flip_payload, {"crc-mismatch"}, "__0_0.distcp:model.embed.weight"),
    "bit in an item's header": (flip_structure, {"bad-header"}, "__0_0.distcp:model.up.weight"),
    "bit in an item's directory": (
        flip_directory,
        {"bad-header", "crc-mismatch", "out-of-bounds", "truncated"},
        "__0_0.distcp:model.up.weight",
    ),
    "bit in the metadata": (lambda f: flip(f / ".metadata", 40), {"bad-header"}, ".metadata"),
    "metadata cut": (lambda f: truncate(f / ".metadata", 0.7), {"truncated"}, ".metadata"),
    "metadata empty": (lambda f: empty(f / ".metadata"), {"empty-file"}, ".metadata"),
    "metadata gone": (lambda f: drop(f / ".metadata"), {"incomplete-save"}, ".metadata"),
    "metadata half committed": (half_committed, {"incomplete-save"}, ".metadata"),
    "shard without its last byte": (
        lambda f: truncate(f / "__1_0.distcp", -1),
        {"truncated"},
        "__1_0.distcp",
    ),
    "shard cut in half": (lambda f: truncate(f / "__1_0.distcp", 0.5), {"truncated"}, "__1_0.distcp"),
    "shard empty": (lambda f: empty(f / "__0_0.distcp"), {"empty-file"}, "__0_0.distcp"),
    "shard gone": (lose_shard, {"missing-file"}, "__1_0.distcp"),
    "shard of an earlier step": (other_step, {"mixed-saves", "step-mismatch"}, ".distcp"),
    "saved into again": (saved_into_again, {"mixed-saves"}, ".distcp"),
    "half of a tensor in no chunk": (hole, {"missing-tensor"}, ".metadata:model.up.weight"),
    "chunks overlap": (overlap, {"shape-mismatch"}, "model.up.weight"),
    "chunks without a place": (unplaced, {"missing-tensor"}, ".metadata"),
    "item beyond the file": (beyond, {"out-of-bounds"}, "__"),
    "another dtype": (other_dtype, {"dtype-mismatch"}, "model.down.weight"),
    "another shape": (other_shape, {"shape-mismatch"}, "model.down.weight"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_at_its_place(what: str, dcp_runs: Path, copied: Copy, verdict: Judge) -> None:
    damage, wanted, subject = DAMAGE[what]
    run = copied(dcp_runs / "fsdp2")
    damage(run / "save_4")
    found = verdict(run)
    assert found.resume in (Resume.UNSAFE, Resume.LOSSY), [f.message for f in found.findings]
    assert wanted & codes(found), codes(found, Severity.INFO)
    assert any(subject in f.subject for f in found.findings if f.code in wanted), [
        (f.code, f.subject) for f in found.findings
    ]
    assert found.path.endswith("save_4")


@pytest.mark.parametrize(
    ("damage", "code"),
    [(stray_shard, "mixed-saves"), (lambda f: append(f / "__0_0.distcp"), "unindexed-tensor")],
)
def test_left_overs_are_warned_of_and_do_no_harm(
    damage: Callable[[Path], None], code: str, dcp_runs: Path, copied: Copy, verdict: Judge
) -> None:
    run = copied(dcp_runs / "fsdp2")
    damage(run / "save_4")
    found = verdict(run)
    assert found.resume is Resume.EXACT
    assert code in codes(found)


def test_a_copy_with_new_times_is_no_alarm(dcp_runs: Path, copied: Copy, verdict: Judge) -> None:
    run = copied(dcp_runs / "fsdp2")
    start = (run / "save_4" / ".metadata").stat().st_mtime
    for after, name in enumerate((".metadata", "__0_0.distcp", "__1_0.distcp")):
        os.utime(run / "save_4" / name, (start + 300 * after,) * 2)
    found = verdict(run)
    assert found.resume is Resume.EXACT
    assert not codes(found)


def test_without_collectives_every_rank_must_have_committed(
    dcp_runs: Path, copied: Copy, verdict: Judge
) -> None:
    run = copied(dcp_runs / "no-collectives")
    drop(run / "save_4" / "__1.metadata")
    found = verdict(run)
    assert found.resume is Resume.UNSAFE
    assert any(f.code == "missing-rank" and f.subject == "__1.metadata" for f in found.findings)


def test_without_collectives_every_rank_must_be_at_the_same_step(
    dcp_runs: Path, copied: Copy, verdict: Judge
) -> None:
    run = copied(dcp_runs / "no-collectives")
    shutil.copyfile(run / "save_2" / "__1_0.distcp", run / "save_4" / "__1_0.distcp")
    found = verdict(run)
    assert found.resume is Resume.UNSAFE
    assert "rank-divergence" in codes(found)


def test_a_store_far_away_is_asked_a_few_times_only(dcp_runs: Path) -> None:
    """Where a request costs more than bytes, the structure of a shard takes one or two of them."""

    class Far(Wrapper):
        asked = 0

        @property
        def traits(self) -> Traits:
            return replace(self.inner.traits, local=False, request_bytes=1 << 20)

        def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            self.asked += 1
            return self.inner.read(key, start, length)

    store = Far(LocalStore(dcp_runs / "fsdp2"))
    manifests = find_checkpoints(build_directory(store.list()), layouts())
    with Reader(store) as reader:
        facts = reader.read(manifests[-1], Wanted(Evidence.STRUCTURE, {}))
    assert len(facts) == 3
    assert store.asked <= 1 + 2 * 2


def test_a_lost_safetensors_shard_is_seen_without_any_index(
    dcp_runs: Path, copied: Copy, verdict: Judge
) -> None:
    run = copied(dcp_runs / "huggingface")
    drop(run / "save_4" / "shard-00001-model-00001-of-00001.safetensors")
    found = verdict(run)
    assert found.resume is Resume.UNSAFE
    assert codes(found) & {"missing-rank", "missing-tensor"}


def test_an_empty_shard_of_a_rank_with_nothing_to_save_is_fine(
    dcp_runs: Path, copied: Copy, verdict: Judge
) -> None:
    run = copied(dcp_runs / "fsdp2")
    (run / "save_4" / "__2_0.distcp").write_bytes(b"")
    found = verdict(run)
    assert (found.resume, codes(found)) == (Resume.EXACT, set())


# --- values and payloads ------------------------------------------------------------------------------


class Payload:
    """Would create a file if it were ever unpickled."""

    def __reduce__(self) -> Any:
        return (os.system, ("touch EXECUTED",))


def save(state: dict[str, Any], folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder.parent


def plain_state(**more: Any) -> dict[str, Any]:
    import torch

    weight = torch.arange(1.0, 7.0).reshape(2, 3)
    moments = {"w": {"step": torch.tensor(3.0), "exp_avg": weight * 0.1, "exp_avg_sq": weight * 0.01}}
    groups = [{"lr": 0.1, "params": ["w"]}]
    return {
        "model": {"w": weight},
        "optimizer": {"state": moments, "param_groups": groups},
        "step": 3,
        **more,
    }


def test_values_inside_items_are_looked_at(tmp_path: Path, verdict: Judge) -> None:
    state = plain_state()
    state["model"]["w"][1, 1] = float("nan")
    assert "nonfinite-weights" in codes(verdict(save(state, tmp_path / "run" / "save_3")))
    state = plain_state()
    state["optimizer"]["state"]["w"]["exp_avg_sq"][0, 0] = -1.0
    assert "invalid-optimizer" in codes(verdict(save(state, tmp_path / "other" / "save_3")))


@pytest.mark.parametrize("depth", [Evidence.STRUCTURE, Evidence.CONTENT])
def test_payloads_are_seen_wherever_they_hide(
    depth: Evidence, tmp_path: Path, verdict: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hidden = {
        "in an object": Payload(),
        "in bytes": pickle.dumps({"state": Payload()}),
        "in bytes in bytes": pickle.dumps(pickle.dumps(Payload(), 2)),
        "in old text": b"cposix\nsystem\n(S'touch EXECUTED'\ntR.",
    }
    for place, value in hidden.items():
        run = save(plain_state(extra=value), tmp_path / place / "save_3")
        found = verdict(run, depth)
        assert found.resume is Resume.UNSAFE, place
        assert any(f.code == "unsafe-pickle" and ".distcp" in f.subject for f in found.findings), place
    assert not (tmp_path / "EXECUTED").exists()


def test_a_payload_in_place_of_the_metadata_is_seen(tmp_path: Path, verdict: Judge) -> None:
    run = save(plain_state(), tmp_path / "run" / "save_3")
    (run / "save_3" / ".metadata").write_bytes(pickle.dumps(Payload()))
    assert any(f.code == "unsafe-pickle" and f.subject == ".metadata" for f in verdict(run).findings)
    assert not Path("EXECUTED").exists()


# --- torchtitan ---------------------------------------------------------------------------------------


def test_torchtitan_runs_are_silent_and_their_last_save_is_told_apart(titan_run: Path, look: Look) -> None:
    report = look(titan_run)
    assert [(v.step, v.layout, v.resume) for v in report.checkpoints] == [
        (2, "torchtitan", Resume.EXACT), (4, "torchtitan", Resume.EXACT), (6, "torchtitan", Resume.LOSSY),
    ]  # fmt: skip
    assert not [f for v in report.checkpoints for f in v.findings if f.loud]
    assert not [f for f in report.findings if f.loud]
    assert report.checkpoints[0].gaps == ("rng",)
    assert report.checkpoints[0].components["dataloader"] is True


def test_a_last_save_of_the_model_alone_is_not_resumed_from(titan_run: Path, look: Look) -> None:
    before = str(titan_run / "checkpoint" / "step-4")
    assert look(titan_run).resume_from == before
    assert preflight(str(titan_run), Options()).resume_from == before
    assert preflight(str(titan_run), Options(allow_lossy=True)).resume_from == before.replace(
        "step-4", "step-6"
    )


def test_torchtitan_loader_states_are_counted(titan_run: Path, copied: Copy, look: Look) -> None:
    run = copied(titan_run)
    folder = run / "checkpoint" / "step-4"

    def change(metadata: Any) -> None:
        del metadata.state_dict_metadata["dataloader.dp_rank_1"]
        for key in [k for k in metadata.storage_data if k.fqn == "dataloader.dp_rank_1"]:
            del metadata.storage_data[key]

    edit_metadata(folder, change)
    found = next(v for v in look(run).checkpoints if v.step == 4)
    assert found.resume is Resume.LOSSY
    assert "topology-mismatch" in codes(found)


def test_a_rotation_that_was_cut_short_is_debris(titan_run: Path, copied: Copy, look: Look) -> None:
    run = copied(titan_run)
    drop(run / "checkpoint" / "step-2" / ".metadata")
    report = look(run)
    assert [v.step for v in report.checkpoints] == [4, 6]
    assert {f.code for f in report.findings} == {"debris"}

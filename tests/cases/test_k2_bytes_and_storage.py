"""K2: bytes and storage: cut, mixed and stale files, several writers, copies that did not end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptguard.testing_cases import Case, at, each
from ckptguard.testing_damage import drop, empty, splice, truncate

Holds = Callable[[Case, Path], list[str]]


def interleaved(run: Path) -> None:
    """Two writers of one name: blocks of both, and the tail of one of them."""
    one, two = run / "ckpt_30.pt", run / "ckpt_20.pt"
    ours, theirs = one.read_bytes(), two.read_bytes()
    block = 8 << 10
    mixed = b"".join(
        (ours if at // block % 2 else theirs)[at : at + block] for at in range(0, len(ours), block)
    )
    one.write_bytes(mixed)


def leftover(run: Path) -> None:
    """A save that failed once: its temporary file stayed, the one before is whole."""
    shutil.copy(run / "ckpt_30.pt", run / "ckpt_30.pt.tmp")
    truncate(run / "ckpt_30.pt.tmp", 0.4)


def leftover_newest(run: Path) -> None:
    (run / "ckpt_30.pt").rename(run / "ckpt_30.pt.tmp")
    truncate(run / "ckpt_30.pt.tmp", 0.4)
    (run / "latest").write_text("ckpt_20.pt")


def ranks(run: Path, world: int = 4) -> None:
    """model_N.pt, optim_N_rankR.pt and meta_N.json in place of each file, as nanochat saves."""
    for step in (10, 20, 30):
        path = run / f"ckpt_{step}.pt"
        held = torch.load(path, weights_only=False)
        torch.save(held["model"], run / f"model_{step:06d}.pt")
        torch.save(held["rng"], run / f"rng_{step:06d}.pt")
        torch.save(held["scheduler"], run / f"scheduler_{step:06d}.pt")
        for rank in range(world):
            part = {
                k: {n: v.flatten().chunk(world)[rank] if n != "step" else v for n, v in s.items()}
                for k, s in held["optimizer"]["state"].items()
            }
            torch.save({**held["optimizer"], "state": part}, run / f"optim_{step:06d}_rank{rank}.pt")
        (run / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "world_size": world}))
        path.unlink()
    (run / "latest").unlink()
    for path in run.iterdir():
        os.utime(path, (1.7e9, 1.7e9))


def sharded(folder: Path, count: int, *, shift: float = 0.0) -> None:
    """The model of a checkpoint in so many shards, with their index."""
    from safetensors.torch import load_file, save_file

    whole = folder / "model.safetensors"
    tensors = {n: t + shift for n, t in load_file(whole).items()}
    names = sorted(tensors)
    mapped, total = {}, 0
    for shard in range(count):
        part = {n: tensors[n] for n in names[shard::count]}
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        mapped |= dict.fromkeys(part, file)
        total += sum(t.numel() * t.element_size() for t in part.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": mapped})
    )


def all_sharded(run: Path) -> None:
    for step in (10, 20, 30):
        sharded(run / f"checkpoint-{step}", 3)
        (run / f"checkpoint-{step}/model.safetensors").unlink()


def resaved_in_fewer(run: Path) -> None:
    """Four shards of another save, and over them two of this one with their index."""
    folder = run / "checkpoint-30"
    sharded(folder, 4, shift=0.5)
    sharded(folder, 2)
    (folder / "model.safetensors").unlink()


RANKS = {"model_000030.pt": "unsafe missing-rank@rank1"}
S2 = "model-00002-of-00003.safetensors"

PLAIN = [
    Case("B15 disk full: cut at a page", at("ckpt_30.pt", truncate, 40960), {"ckpt_30.pt": "unsafe truncated|bad-header"}, "ckpt_20.pt", run="pointer-to-unsafe early-pointer?"),
    Case("B17 old temporary file [TRAP]", leftover, {"ckpt_30.pt.tmp": "-"}, "ckpt_30.pt"),
    Case("B17 the newest save has only its temporary file", leftover_newest, {"ckpt_30.pt.tmp": "unsafe incomplete-save truncated? bad-header?"}, "ckpt_20.pt"),
    Case("B19 two writers", interleaved, {"ckpt_30.pt": "unsafe crc-mismatch|bad-header|truncated missing-tensor? step-mismatch?"}, "ckpt_20.pt", run="pointer-to-unsafe"),
    Case("B21 a sync that did not end", at("ckpt_30.pt", truncate, 65536), {"ckpt_30.pt": "unsafe truncated|bad-header"}, "ckpt_20.pt", run="pointer-to-unsafe"),
    Case("B31 half of one upload, half of another", each(lambda run: splice(run / "ckpt_30.pt", run / "ckpt_20.pt")), {"ckpt_30.pt": "unsafe crc-mismatch|bad-header|truncated missing-tensor? step-mismatch?"}, "ckpt_20.pt", run="pointer-to-unsafe"),
    Case("B20 all ranks", ranks, {}, "model_000030.pt"),
    Case("B20 one rank gone", each(ranks, at("optim_000030_rank1.pt", drop)), RANKS, "model_000020.pt"),
    Case("B20 the last rank gone", each(ranks, at("optim_000030_rank3.pt", drop)), {"model_000030.pt": "unsafe missing-rank@rank3"}, "model_000020.pt"),
    Case("B20 one rank cut", each(ranks, at("optim_000030_rank2.pt", truncate, 0.5)), {"model_000030.pt": "unsafe truncated|bad-header@rank2"}, "model_000020.pt"),
    Case("B20 one rank gone in the first", each(ranks, at("optim_000010_rank0.pt", drop)), {"model_000010.pt": "unsafe missing-rank@rank0"}, "model_000030.pt"),
    Case("B20 model gone", each(ranks, at("model_000030.pt", drop)), {"model_000030.pt": "-", "optim_000030_rank0.pt": "unsafe missing-model"}, "model_000020.pt"),
    Case("B20 all of the optimizer gone", each(ranks, at("optim_000030_rank*.pt", drop)), {"model_000030.pt": "lossy missing-optimizer"}, "model_000020.pt", safe="model_000030.pt"),
    Case("B20 no meta", each(ranks, at("meta_000030.json", drop)), {"model_000030.pt": "lossy missing-trainer-state"}, "model_000020.pt", safe="model_000030.pt"),
]  # fmt: skip

TRAINER = [
    Case("B22 shards, whole", all_sharded, {}, "checkpoint-30"),
    Case("B22 the middle shard gone", each(all_sharded, at(f"checkpoint-30/{S2}", drop)), {"checkpoint-30": f"unsafe missing-file@{S2} missing-tensor? shape-mismatch? config-mismatch?"}, "checkpoint-20"),
    Case("B22 the middle shard empty", each(all_sharded, at(f"checkpoint-30/{S2}", empty)), {"checkpoint-30": f"unsafe empty-file@{S2} missing-tensor? shape-mismatch? config-mismatch?"}, "checkpoint-20"),
    Case("B22 the index gone", each(all_sharded, at("checkpoint-30/model.safetensors.index.json", drop)), {"checkpoint-30": "unsafe missing-file@index"}, "checkpoint-20"),
    Case("B22 first checkpoint's shard gone", each(all_sharded, at(f"checkpoint-10/{S2}", drop)), {"checkpoint-10": f"unsafe missing-file@{S2} missing-tensor? shape-mismatch? config-mismatch?"}, "checkpoint-30"),
    Case("B23 re-saved in fewer shards", resaved_in_fewer, {"checkpoint-30": "unsafe|lossy mixed-saves@of-00004 duplicate-tensor? unindexed-tensor?"}, "checkpoint-20", safe="checkpoint-30"),
]  # fmt: skip


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_loop(case: Case, holds: Holds, plain_run: Path) -> None:
    assert holds(case, plain_run) == []


@pytest.mark.parametrize("case", TRAINER, ids=str)
def test_trainer(case: Case, holds: Holds, trainer_run: Path) -> None:
    assert holds(case, trainer_run) == []

"""`ckptguard audit` and `ckptguard seal` as a user calls them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def flip(path: Path, at: int) -> None:
    """Flip one bit and leave the file's time as it was: rot, not a write."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at % before.st_size)
        byte = file.read(1)[0]
        file.seek(at % before.st_size)
        file.write(bytes([byte ^ 0x10]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_healthy_run_is_exact_and_silent(run, command):
    result = command("audit", run, "--json")
    assert result.exit_code == 0
    document = result.document
    assert [c["resume"] for c in document["checkpoints"]] == ["exact"] * 3
    assert [f for c in document["checkpoints"] for f in c["findings"]] == []
    assert document["findings"] == []
    assert document["latest"] == document["newest_safe"] == document["resume_from"] == f"{run}/ckpt_30.pt"
    newest = document["checkpoints"][-1]
    assert newest["coverage"]["not_run"] == []
    assert newest["bytes"] == newest["coverage"]["bytes_read"] == (run / "ckpt_30.pt").stat().st_size
    assert newest["health"]["status"] == "healthy"


def test_an_audit_changes_nothing(run, command):
    before = {p: p.stat() for p in run.rglob("*")}
    command("audit", run)
    after = {p: p.stat() for p in run.rglob("*")}
    assert {p: (s.st_size, s.st_mtime_ns) for p, s in before.items()} == {
        p: (s.st_size, s.st_mtime_ns) for p, s in after.items()
    }


def test_a_flipped_bit_names_the_tensor(run, command):
    from ckptguard.formats import parse
    from ckptguard.storage.local import LocalStore

    path = run / "ckpt_30.pt"
    tensor = next(
        t
        for t in parse(LocalStore(run), "ckpt_30.pt", path.stat().st_size, "torch").tensors
        if t.name == "model.2.weight"
    )
    flip(path, tensor.start + 7)
    document = command("audit", run, "--json").document
    found = document["checkpoints"][-1]["findings"]
    assert [(f["code"], f["subject"]) for f in found] == [("crc-mismatch", "ckpt_30.pt:model.2.weight")]
    assert document["resume_from"] == f"{run}/ckpt_20.pt"
    assert [f["code"] for f in document["findings"]] == ["pointer-to-unsafe"]


def test_structure_does_not_see_it_and_says_so(run, command):
    flip(run / "ckpt_30.pt", 20_000)
    newest = command("audit", run, "--depth", "structure", "--json").document["checkpoints"][-1]
    assert newest["evidence"] == "structure"
    assert "checksums" in {n["check"] for n in newest["coverage"]["not_run"]}


def test_one_checkpoint_is_judged_with_its_siblings_in_view(run, command):
    import torch

    path = run / "ckpt_30.pt"
    state = torch.load(path, weights_only=False)
    del state["optimizer"]
    torch.save(state, path)
    document = command("audit", path, "--json").document
    assert [c["path"] for c in document["checkpoints"]] == [str(path)]
    assert [(f["code"], f["severity"]) for f in document["checkpoints"][0]["findings"]] == [
        ("missing-optimizer", "warning")
    ]


def test_statuses(run, tmp_path, command):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert command("audit", empty, "--json").document["error"]["code"] == "nothing-recognised"
    assert command("audit", tmp_path / "no", "--json").document["error"]["code"] == "not-found"
    assert command("audit", run, "--depth", "deep", "--json").document["error"]["code"] == "usage"
    assert command("audit", run, empty).exit_code == 2
    flip(run / "ckpt_30.pt", 20_000)
    assert command("audit", run).exit_code == 1


def test_several_targets_give_a_list(run, tmp_path, command):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    documents = command("audit", run, other, "--json").document
    assert [d["target"] for d in documents] == [str(run), str(other)]


def test_strict_counts_the_runs_warnings(run, command):
    (run / "latest").write_text("ckpt_20.pt\n")
    before = (run / "ckpt_20.pt").stat()
    os.utime(
        run / "latest", ns=(before.st_atime_ns, before.st_mtime_ns)
    )  # else it looks like a deliberate roll-back
    assert command("audit", run, "--grace", "0").exit_code == 0
    assert command("audit", run, "--grace", "0", "--strict").exit_code == 1


def test_table_for_people(run, command):
    out = command("audit", run).stdout
    assert f"resume from  {run}/ckpt_30.pt" in out
    assert "\x1b[" not in out


def test_a_seal_proves_what_no_checksum_does(run, tmp_path, command):
    import torch
    from safetensors.torch import save_file

    export = tmp_path / "export"
    export.mkdir()
    save_file({"layer.weight": torch.randn(64, 64)}, export / "model.safetensors")
    assert command("audit", export, "--json").document["checkpoints"][0]["findings"][-1]["code"] in (
        "unverifiable",
        "missing-scheduler",
        "missing-rng",
    )
    assert command("seal", export).exit_code == 0
    assert not list(export.rglob("*seal*")) or ".ckptguard" in str(next(export.rglob("*.json")))
    sealed = command("audit", export, "--json").document["checkpoints"][0]
    assert "unverifiable" not in {f["code"] for f in sealed["findings"]}
    flip(export / "model.safetensors", -100)
    rotten = command("audit", export, "--json").document["checkpoints"][0]
    assert rotten["resume"] == "unsafe"
    assert "digest-mismatch" in {f["code"] for f in rotten["findings"]}
    assert command("seal", export).exit_code == 1


def test_seal_refuses_another_content_without_force(run, command):
    path = run / "ckpt_30.pt"
    assert command("seal", path).exit_code == 0
    old = path.stat()
    shutil.copy(run / "ckpt_20.pt", run / "other.pt")
    path.write_bytes((run / "other.pt").read_bytes()[: old.st_size])
    (run / "other.pt").unlink()
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    result = command("seal", path)
    assert result.exit_code == 1
    assert "digest-mismatch" in result.stderr or "sealed before" in result.stderr


def test_a_loops_own_checkpoint_directories_are_not_the_trainers(tmp_path, command, trained):
    """People name directories checkpoint-N as the Trainer does, and save what they like in them."""
    import torch

    for step in (10, 20):
        state = torch.load(trained / f"ckpt_{step}.pt", weights_only=False)
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        torch.save(state["model"], folder / "model.pt")
        torch.save(state["optimizer"], folder / "optimizer.pt")
        (folder / "training_state.json").write_text(f'{{"step": {step}}}')
    document = command("audit", tmp_path, "--grace", "0", "--json").document
    assert [(c["layout"], c["step"], c["resume"]) for c in document["checkpoints"]] == [
        ("torch-file", 10, "lossy"),
        ("torch-file", 20, "lossy"),
    ]
    assert {f["severity"] for c in document["checkpoints"] for f in c["findings"]} == {"info"}
    assert document["resume_from"] == f"{tmp_path}/checkpoint-20"


def test_a_page_of_zeros_is_seen_without_a_checksum(tmp_path, command):
    """What a disk or an interrupted copy leaves: a hole of zeros in a file that carries no checksum."""
    import torch
    from safetensors.torch import save_file

    weight = torch.randn(256, 256)
    weight[:32] = 0  # rows that are zero in every checkpoint (padding) are meant so
    for step in (10, 20, 30):
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        save_file(
            {"layer.weight": weight + (weight != 0) * torch.randn(256, 256) * 0.01},
            folder / "model.safetensors",
        )
    assert command("audit", tmp_path, "--grace", "0").exit_code == 0
    with (tmp_path / "step_30" / "model.safetensors").open("r+b") as file:
        file.seek(100_000)
        file.write(bytes(8192))
    newest = command("audit", tmp_path, "--grace", "0", "--json").document["checkpoints"][-1]
    assert [(f["code"], f["subject"]) for f in newest["findings"] if f["effect"] == "unsafe"] == [
        ("zero-weights", "model.safetensors:layer.weight")
    ]


def test_the_recorders_log_is_the_runs_log(run, command):
    """A rate that the recorded schedule never had is seen where the step log is the only one."""
    import torch

    ours = run / ".ckptguard"
    ours.mkdir()
    rows = (run / "metrics.jsonl").read_text().splitlines()
    (ours / "steps-0.jsonl").write_text("".join(f'{{"attempt": 1, {row[1:]}\n' for row in rows))
    (run / "metrics.jsonl").unlink()
    assert command("audit", run, "--json").document["checkpoints"][-1]["health"]["status"] == "healthy"
    path = run / "ckpt_20.pt"
    state = torch.load(path, weights_only=False)
    for group in state["optimizer"]["param_groups"]:
        group["lr"] *= 10
    state["scheduler"]["_last_lr"] = [rate * 10 for rate in state["scheduler"]["_last_lr"]]
    torch.save(state, path)
    found = command("audit", run, "--json").document["checkpoints"][1]["findings"]
    assert "lr-mismatch" in {f["code"] for f in found}


def test_a_seal_of_the_run_is_seen_from_a_checkpoint_named_directly(run, tmp_path, command):
    """RUN/.ckptguard holds the seal, RUN/checkpoints/x is what people name."""
    outer = tmp_path / "outer"
    outer.mkdir()
    shutil.move(run, outer / "checkpoints")
    shutil.move(outer / "checkpoints" / "metrics.jsonl", outer / "metrics.jsonl")
    path = outer / "checkpoints" / "ckpt_30.pt"
    assert command("audit", outer, "--json").document["checkpoints"][-1]["path"] == str(path)
    (outer / ".ckptguard").mkdir()
    (outer / ".ckptguard" / "steps-0.jsonl").touch()
    assert command("seal", path).exit_code == 0
    assert list((outer / ".ckptguard" / "seals").rglob("ckpt_30.pt.json"))
    flip(path, 20_000)
    document = command("audit", path, "--json").document
    assert [c["path"] for c in document["checkpoints"]] == [str(path)]
    assert "digest-mismatch" in {f["code"] for f in document["checkpoints"][0]["findings"]}

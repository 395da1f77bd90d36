"""`kill -9` at random moments: the source is never changed, and nothing is called complete that is not."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptguard.replica_look import list_tree
from ckptguard.replicate import RECEIPTS
from ckptguard.seals import Seal, seal_file, write_seal
from ckptguard.storage import open_store
from ckptguard.storage.local import LocalStore

pytestmark = pytest.mark.s3

MakeRun = Callable[[], Path]
ROUNDS = [3, pytest.param(40, marks=pytest.mark.soak)]


@pytest.fixture
def run(make_run: MakeRun) -> Path:
    """A run with a file that goes in several parts, and a pointer."""
    root = make_run()
    torch.save(
        {f"layer.{n}": torch.randn(1 << 20) for n in range(10)}, root / "checkpoint-30/pytorch_extra.bin"
    )
    (root / "latest").write_text("checkpoint-30")
    return root


def contents(root: Path) -> dict[str, str]:
    return {
        p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file() and ".ckptguard" not in p.relative_to(root).parts
    }


def killed(arguments: list[object], within: float) -> bool:
    """Run a command and kill it at a random moment; whether it was still running then."""
    command = [sys.executable, "-m", "ckptguard", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            process.wait(random.uniform(0, within))
        except subprocess.TimeoutExpired:
            process.kill()
            return True
    return False


def seconds_of(arguments: list[object]) -> float:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ckptguard", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return time.monotonic() - begin


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("to", ["s3", "disk"])
def test_replicate(run: Path, s3_bucket: str, tmp_path: Path, to: str, rounds: int) -> None:
    before = contents(run)
    place = (lambda n: f"{s3_bucket}/copy-{n}") if to == "s3" else (lambda n: str(tmp_path / f"copy-{n}"))
    command: list[object] = [
        "replicate",
        run / "checkpoint-30",
        "DESTINATION",
        "--quiet",
        "--depth",
        "structure",
    ]
    command[2] = place("timing")
    usual = seconds_of(command)
    for n in range(rounds):
        command[2] = place(n % 5)
        killed(command, usual * 1.2)
        assert contents(run) == before
        _what_is_called_complete_is(run, place(n % 5))
    for n in range(min(rounds, 5)):
        command[2] = place(n)
        seconds_of(command)
        assert _what_is_called_complete_is(run, place(n))
    assert contents(run) == before


def _what_is_called_complete_is(run: Path, url: str) -> bool:
    """Checks whatever claims that the copy is complete; returns whether anything does."""
    if "://" not in url and not Path(url).exists():
        return False
    store = open_store(url)
    tree = list_tree(store)
    keys = {e.key for e in store.list()}
    names = {p.name for p in (run / "checkpoint-30").iterdir()}

    def whole() -> bool:
        return all(
            f"checkpoint-30/{name}" in keys
            and store.read(f"checkpoint-30/{name}") == (run / "checkpoint-30" / name).read_bytes()
            for name in names
        )

    claims = [f"{RECEIPTS}/checkpoint-30.json" in keys, any(p.resolved for p in tree.pointers())]
    if store.traits.local:
        claims.append((Path(url) / "checkpoint-30").exists())
    assert whole() or not any(claims)
    if claims[0]:
        assert set(json.loads(store.read(f"{RECEIPTS}/checkpoint-30.json"))["files"]) == names
    return any(claims)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_repair(run: Path, s3_bucket: str, rounds: int) -> None:
    good, store = contents(run), LocalStore(run)
    manifest = next(m for m in list_tree(store).checkpoints if m.path == "checkpoint-30")
    sealed = {f.name: seal_file(store, f.entry, 1 << 20) for f in manifest.files}
    write_seal(store, "", Seal(checkpoint="checkpoint-30", files=sealed, block_size=1 << 20))
    seconds_of(["replicate", run / "checkpoint-30", s3_bucket, "--quiet", "--depth", "structure"])
    replica = {e.key: e.etag for e in open_store(s3_bucket).list()}
    target = run / "checkpoint-30/pytorch_extra.bin"
    data = bytearray(target.read_bytes())
    for at in range(1000, len(data), len(data) // 5):
        data[at] ^= 1

    def damage() -> dict[str, str]:
        target.unlink(missing_ok=True)
        target.write_bytes(data)
        return contents(run)

    bad, command = damage(), ["repair", run / "checkpoint-30", "--from", s3_bucket, "--apply", "--quiet"]
    usual = seconds_of(command)
    assert contents(run) == good
    for _ in range(rounds):
        damage()
        killed(command, usual * 1.2)
        assert contents(run) in (good, bad)
        assert {e.key: e.etag for e in open_store(s3_bucket).list()} == replica
    damage()
    seconds_of(command)
    assert contents(run) == good

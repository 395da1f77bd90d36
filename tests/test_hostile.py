"""Checkpoints made to harm: nothing in them runs, nothing stops the rest of the audit, nothing takes long."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptguard.errors import FormatError, KeyNotFound, StoreDenied
from ckptguard.facts import Reader, Wanted
from ckptguard.inspect import Options, audit, preflight
from ckptguard.model import Entry, Evidence, Manifest, ManifestFile, Resume
from ckptguard.storage.local import LocalStore
from ckptguard.testing import FaultyStore
from ckptguard.testing_damage import disagree, duplicate_record, flip, replace_pickle, rewrite_archive

Damage = Callable[[Path], object]
OPTIONS = Options(grace=0.0)


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def state(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Linear(300, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for _ in range(step):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "step": step,
    }


@pytest.fixture(scope="session")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "run"
    folder.mkdir()
    for step in (10, 20):
        torch.save(state(step), folder / f"ckpt_{step}.pt")
    return folder


@pytest.fixture
def run(good_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_run, tmp_path / "run"))


def verdicts(run: Path, options: Options = OPTIONS) -> dict[str, tuple[Resume, set[str]]]:
    (report,) = audit(str(run), options)
    return {Path(v.path).name: (v.resume, {f.code for f in v.findings}) for v in report.checkpoints}


def test_the_run_is_good_before_anything_is_done_to_it(run: Path) -> None:
    assert verdicts(run) == {"ckpt_10.pt": (Resume.EXACT, set()), "ckpt_20.pt": (Resume.EXACT, set())}


# --- payloads -----------------------------------------------------------------------------------------


def with_pickle(data: bytes) -> Damage:
    return lambda path: replace_pickle(path, data)


def _with_extra(payload: Any) -> Damage:
    def change(path: Path) -> None:
        held = torch.load(path, weights_only=False)
        torch.save({**held, "extra": payload}, path)

    return change


def _torchscript_mask(path: Path) -> None:
    """A record that makes readers take the file for TorchScript and look no further."""
    hide(path)
    rewrite_archive(
        path, lambda records: records.append((records[0][0].split("/")[0] + "/constants.pkl", b"\x80\x02)."))
    )


def hide(path: Path) -> None:
    replace_pickle(path, pickle.dumps({"model": {}, "x": Canary(path.parent / "canary")}, 2))


def _broken_crc(path: Path) -> None:
    hide(path)
    disagree(
        path, "byteorder" if "byteorder" in zipfile.ZipFile(path).namelist()[-1] else "data.pkl", field="crc"
    )


def _other_name(path: Path) -> None:
    hide(path)
    disagree(path, "data.pkl")


def _traversal(path: Path) -> None:
    rewrite_archive(path, lambda records: records.append(("ckpt_20/../../etc/cron.d/x", b"x")))


def _absolute(path: Path) -> None:
    rewrite_archive(path, lambda records: records.append(("/etc/cron.d/x", b"x")))


def _compressed(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        records = [(i.filename, archive.read(i)) for i in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records:
            archive.writestr(name, data)


def _nested(path: Path) -> None:
    """What a framework unpickles a second time after loading."""
    _with_extra(pickle.dumps(Canary(path.parent / "canary")))(path)


def _in_bytes_io(path: Path) -> None:
    import io

    _with_extra(io.BytesIO(pickle.dumps(Canary(path.parent / "canary"))))(path)


def _legacy(path: Path) -> None:
    held = torch.load(path, weights_only=False)
    held["x"] = Canary(path.parent / "canary")
    torch.save(held, path, _use_new_zipfile_serialization=False)


def _legacy_keys(path: Path) -> None:
    """The payload in the fifth pickle, the list of storages, which is read last."""
    held = torch.load(path, weights_only=False)
    torch.save(held, path, _use_new_zipfile_serialization=False)
    raw = path.read_bytes()
    at = raw.rindex(b".", 0, raw.index(b"\x80\x02]q\x00("))
    path.write_bytes(raw[: at + 1] + pickle.dumps(Canary(path.parent / "canary"), 2) + raw[at + 1 :])


def _nested_and_broken(path: Path) -> None:
    """The inner pickle breaks after its payload has run: too late for who loads it."""
    _with_extra(pickle.dumps(Canary(path.parent / "canary"))[:-1] + b"\xff")(path)


UNSAFE: dict[str, Damage] = {
    "a plain payload": lambda path: _with_extra(Canary(path.parent / "canary"))(path),
    "the whole file is one pickle": lambda path: path.write_bytes(
        pickle.dumps(Canary(path.parent / "canary"))
    ),
    "another pickle for data.pkl": hide,
    "a name built on the stack": with_pickle(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R."),
    "an extension code": with_pickle(b"\x80\x02\x82\x01)R."),
    "an object": with_pickle(b"(cos\nsystem\nS'id'\no."),
    "an instance": with_pickle(b"(S'id'\nios\nsystem\n."),
    "several pickles, the first harmless": with_pickle(
        pickle.dumps({"model": {}}, 2) + pickle.dumps(Canary(Path("canary")), 2)
    ),
    "a protocol that does not exist": with_pickle(b"\x80\xff" + pickle.dumps(Canary(Path("canary")), 2)[2:]),
    "a persistent id that is no storage": with_pickle(b"\x80\x02cos\nsystem\nQ."),
    "a storage of a class that is none": with_pickle(
        b"\x80\x02(X\x07\x00\x00\x00storagecos\nsystem\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ."
    ),
    "a broken checksum": _broken_crc,
    "another name in the local header": _other_name,
    "a second data.pkl": lambda path: duplicate_record(
        path, "data.pkl", pickle.dumps(Canary(path.parent / "canary"), 2)
    ),
    "a path out of the archive": _traversal,
    "an absolute path": _absolute,
    "compressed records": _compressed,
    "the mask of TorchScript": _torchscript_mask,
    "a pickle in a pickle": _nested,
    "a pickle in a buffer": _in_bytes_io,
    "the old format": _legacy,
    "the old format, in its list of storages": _legacy_keys,
    "a pickle in a pickle, broken behind its payload": _nested_and_broken,
    "a 7z archive": lambda path: path.write_bytes(b"7z\xbc\xaf\x27\x1c\x00\x04" + bytes(500)),
    "a gzip stream": lambda path: path.write_bytes(b"\x1f\x8b\x08\x00" + bytes(500)),
    "a text": lambda path: path.write_text("import os; os.system('id')\n" * 20),
}


@pytest.mark.parametrize("depth", [Evidence.STRUCTURE, Evidence.CONTENT])
@pytest.mark.parametrize("name", UNSAFE)
def test_payload(name: str, depth: Evidence, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    UNSAFE[name](run / "ckpt_20.pt")
    found = verdicts(run, Options(depth=depth, grace=0.0))
    resume, codes = found["ckpt_20.pt"]
    assert resume is Resume.UNSAFE
    assert codes & {"unsafe-pickle", "bad-header", "crc-mismatch"}, codes
    assert found["ckpt_10.pt"][0] is Resume.EXACT
    assert preflight(str(run), OPTIONS).resume_from == str(run / "ckpt_10.pt")
    assert not list(run.parent.rglob("canary"))


def test_no_command_runs_a_payload(run: Path) -> None:
    """Each command as a process of its own; `restore` refuses before it loads."""
    _with_extra(Canary(run / "canary"))(run / "ckpt_20.pt")
    newest = str(run / "ckpt_20.pt")
    recipe = run.parent / "recipe.py"
    recipe.write_text("def build(device):\n    return {}\n\ndef step(parts):\n    return {}\n")
    for arguments in (
        ["audit", str(run), "--json"],
        ["preflight", str(run)],
        ["seal", newest],
        ["run", str(run), "--", sys.executable, "-c", ""],
        ["replicate", newest, str(run.parent / "copy")],
        ["repair", newest, "--from", str(run.parent / "copy")],
        ["prune", str(run), "--keep-last", "1"],
        ["preflight", str(run), "--quarantine"],
        ["restore", newest, "--recipe", f"{recipe}:build"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ckptguard", *arguments], capture_output=True, text=True, timeout=60
        )
        assert "Traceback" not in done.stderr, (arguments, done.stderr)
        assert not list(run.parent.rglob("canary")), arguments


# --- sizes --------------------------------------------------------------------------------------------


def _claims_terabytes(path: Path) -> None:
    path.with_name("model-20.safetensors").write_bytes(struct.pack("<Q", 1 << 42) + b"{}")
    path.unlink()


def _zip_of_terabytes(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\x05\x06")
    struct.pack_into("<HHII", raw, at + 8, 0xFFFE, 0xFFFE, 0xFFFFFFF0, 0xFFFFFF00)
    path.write_bytes(raw)


def _zip64_of_exabytes(path: Path) -> None:
    raw = path.read_bytes()
    at = raw.rindex(b"PK\x05\x06")
    record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 1 << 60, 1 << 60, 1 << 60, 0)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
    path.write_bytes(raw[:at] + record + locator + raw[at:])


def _tensor_of_exabytes(path: Path) -> None:
    held = {"model": {"w": torch.ones(4)}, "step": 20}
    torch.save(held, path)
    with zipfile.ZipFile(path) as archive:
        data = archive.read("ckpt_20/data.pkl")
    replace_pickle(path, data.replace(b"K\x04\x85q", b"\x8a\x07\xff\xff\xff\xff\xff\xff\x00\x85q", 1))


def _deep(path: Path) -> None:
    replace_pickle(path, b"]" * 30_000 + b"a" * 29_999 + b".")


def _doubling(path: Path) -> None:
    body = b"\x80\x02]q\x00" + b"".join(
        b"](h" + bytes([i - 1]) + b"h" + bytes([i - 1]) + b"eq" + bytes([i]) for i in range(1, 200)
    )
    replace_pickle(path, body + b".")


def _wide(path: Path) -> None:
    """Dictionaries of the same dictionary: small in the file, endless for who walks them."""
    key = iter(range(1_000_000))
    body = b"\x80\x02}q\x00"
    for level in range(1, 5):
        pairs = b"".join(b"J" + struct.pack("<i", next(key)) + b"h" + bytes([level - 1]) for _ in range(3000))
        body += b"}q" + bytes([level]) + b"(" + pairs + b"u"
    replace_pickle(path, body + b".")


def _lying_json(path: Path) -> None:
    path.with_name("model-20.safetensors").write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000)
    path.unlink()


BOMBS: dict[str, Damage] = {
    "a header of four terabytes": _claims_terabytes,
    "a directory of four gigabytes": _zip_of_terabytes,
    "a directory of exabytes": _zip64_of_exabytes,
    "a tensor of exabytes": _tensor_of_exabytes,
    "a deep pickle": _deep,
    "a doubling pickle": _doubling,
    "a wide pickle": _wide,
    "deep JSON": _lying_json,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb(name: str, run: Path) -> None:
    import resource

    BOMBS[name](run / "ckpt_20.pt")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = verdicts(run)
    assert time.process_time() - start < 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10
    broken = [k for k in found if k != "ckpt_10.pt"]
    assert [found[k][0] for k in broken] == [Resume.UNSAFE]
    assert found["ckpt_10.pt"][0] is Resume.EXACT


# --- what a directory may hold ------------------------------------------------------------------------


def test_a_fifo_and_a_device_are_never_opened(run: Path) -> None:
    os.mkfifo(run / "ckpt_30.pt")
    os.mknod(run / "ckpt_40.pt", 0o600 | 0o020000, os.makedev(1, 5)) if os.geteuid() == 0 else None
    found = verdicts(run)
    assert found["ckpt_20.pt"][0] is Resume.EXACT
    assert not any(v[0].safe for k, v in found.items() if k in ("ckpt_30.pt", "ckpt_40.pt"))


def test_links_in_a_circle_end(run: Path) -> None:
    (run / "loop").symlink_to(run)
    (run / "itself").symlink_to(run / "itself")
    (run / "up").symlink_to(run.parent)
    (run / "ckpt_30.pt").symlink_to(run / "nowhere.pt")
    assert verdicts(run)["ckpt_20.pt"] == (Resume.EXACT, set())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a user to step down from")
def test_a_file_of_another_user_is_unknown_and_the_audit_goes_on(good_run: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(good_run, Path(folder) / "run"))
        Path(folder).chmod(0o755)
        (run / "ckpt_20.pt").chmod(0)
        _audit_as_nobody(run)


def _audit_as_nobody(run: Path) -> None:
    code = (
        "import os, sys, json; from ckptguard.inspect import audit, Options; from ckptguard.registry import checks, layouts;"
        "checks(); layouts(); os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        "r = audit(sys.argv[1], Options(grace=0))[0]; print(json.dumps([[v.resume, [f.code for f in v.findings]] for v in r.checkpoints]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == '[["exact", []], ["unknown", ["unreadable"]]]', done.stderr


def _read(store: FaultyStore, name: str, depth: Evidence = Evidence.CONTENT) -> Any:
    entry = store.stat(name)
    manifest = Manifest(
        name, "torch-file", (ManifestFile(name, Entry(name, entry.size, entry.modified), format="torch"),)
    )
    with Reader(store, 2) as reader:
        return reader.read(manifest, Wanted(depth, {}))[name]


def test_faults_of_the_store_are_not_faults_of_the_file(run: Path) -> None:
    inner = LocalStore(run)
    name = "ckpt_20.pt"
    middle = flip(run / "ckpt_10.pt", record="")

    def codes(**faults: Any) -> list[str]:
        return [p.code for p in _read(FaultyStore(inner, **faults), name).problems]

    assert codes() == []
    assert codes(deny={name: StoreDenied("no")}) == ["unreadable"]
    assert codes(deny={name: KeyNotFound("gone")}) == ["missing-file"]
    assert codes(cut={name: 5000}) == ["truncated"]  # once, though both looks stumble over it
    assert codes(fail_first={name: 1}) == ["unreadable"]
    assert codes(flip={name: middle}) == ["crc-mismatch"]
    assert codes(flip_once={name: middle}) == ["unstable-read"]
    assert codes(slow=0.001) == []


def test_a_file_that_disappears_during_the_look(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptguard import facts

    parse = facts.Reader._parse

    def vanishing(self: Any, store: Any, file: ManifestFile, *rest: Any) -> Any:
        if file.name == "ckpt_20.pt":
            (run / "ckpt_20.pt").unlink(missing_ok=True)
        return parse(self, store, file, *rest)

    monkeypatch.setattr(facts.Reader, "_parse", vanishing)
    (report,) = audit(str(run), OPTIONS)
    assert [Path(v.path).name for v in report.checkpoints] == ["ckpt_10.pt"]
    assert "debris" in {f.code for f in report.findings}


def test_a_fault_of_ours_is_a_finding_and_never_a_verdict(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptguard import formats

    def stumble(source: Any) -> Any:
        if source.key == "ckpt_20.pt":
            raise ZeroDivisionError("our own mistake")
        return formats._torch(source)

    monkeypatch.setitem(formats.READERS, "torch", stumble)
    found = verdicts(run)
    assert found["ckpt_10.pt"][0] is Resume.EXACT
    assert found["ckpt_20.pt"] == (Resume.UNKNOWN, {"check-failed"} | found["ckpt_20.pt"][1])


def test_anything_unforeseen_ends_with_2_and_no_traceback(run: Path) -> None:
    code = (
        "import sys; import ckptguard.inspect as i\n"
        "def audit(*a, **k): raise ZeroDivisionError('our own mistake')\n"
        "i.audit = audit\n"
        "from ckptguard.cli import main\n"
        f"sys.argv = ['ckptguard', 'audit', {str(run)!r}, '--json']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert '"code": "internal"' in done.stdout


def test_the_error_of_a_reader_names_no_code_outside_of_the_contract() -> None:
    from ckptguard.codes import CODES

    assert {
        FormatError(c, "").code
        for c in ("bad-header", "truncated", "out-of-bounds", "size-mismatch", "incomplete-save")
    } <= CODES.keys()

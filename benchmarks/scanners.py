"""Our verdict on pickles beside those of other scanners, on the same files: false positives and false negatives.

Each scanner lives in a virtual environment of its own, made here with pip. One that cannot be installed is shown as absent.
Benign files are what trainings write; hostile ones only ever name their payload's function, and nothing here loads them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import venv
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

Answer = bool | None
"""Whether a scanner calls a file unsafe; None where it gave up."""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def picklescan(home: Path, file: Path) -> Answer:
    # Its exit statuses: 0 clean, 1 found something, 2 could not scan.
    return {0: False, 1: True}.get(_run(f"{home}/bin/picklescan", "-p", str(file)).returncode)


def modelaudit(home: Path, file: Path) -> Answer:
    """Critical issues alone count: it has warnings for nearly every file, a healthy one too."""
    done = _run(f"{home}/bin/modelaudit", "scan", "--format", "json", str(file))
    try:
        issues = json.loads(done.stdout)["issues"]
    except (ValueError, KeyError):
        return None
    return any(issue["severity"] == "critical" for issue in issues)


FICKLING = """
import sys
from fickling import scan_zip_archive
print(all(found.is_safe for found in scan_zip_archive(sys.argv[1]).values()))
"""


def fickling(home: Path, file: Path) -> Answer:
    """By its own verdict, `is_safe`, over the pickles of the archive."""
    done = _run(f"{home}/bin/python", "-c", FICKLING, str(file))
    return {"True": False, "False": True}.get(done.stdout.strip())


SCANNERS: dict[str, tuple[tuple[str, ...], Callable[[Path, Path], Answer]]] = {
    "picklescan": (("picklescan==1.0.5",), picklescan),
    "modelaudit": (("modelaudit==0.2.54",), modelaudit),
    # It imports typing_extensions and does not ask for it.
    "fickling": (("fickling==0.1.12", "typing_extensions"), fickling),
}


class Payload:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


def benign(folder: Path) -> list[Path]:
    import numpy as np
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    held = {
        "weights.pt": model.state_dict(),
        "training.pt": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3},
        "rng.pth": {"numpy": np.random.get_state(), "torch": torch.get_rng_state()},
        "args.bin": argparse.Namespace(lr=1e-3, path=Path("runs/a"), betas=(0.9, 0.999)),
        "ordered.pt": OrderedDict(a=np.float32(1.5), b=np.arange(4)),
        "dtype.pt": {"dtype": torch.bfloat16, "device": torch.device("cpu"), "size": torch.Size([2])},
    }
    for name, value in held.items():
        torch.save(value, folder / name)
    return [folder / name for name in held]


def hostile(folder: Path) -> list[Path]:
    import torch

    from ckptguard.testing_damage import disagree, replace_pickle

    def archive(name: str, data: bytes) -> Path:
        torch.save({"w": torch.ones(2)}, folder / name)
        replace_pickle(folder / name, data)
        return folder / name

    plain = pickle.dumps(Payload(), 2)
    made = {
        "payload.pt": plain,
        "stack.pt": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
        "second.pt": pickle.dumps({}, 2) + plain,
        "broken_after.pt": plain[:-1] + b"\xff.",
        "dotted.pt": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x04true\x85R.",
        "base_init.pt": b"ccopy_reg\n_reconstructor\n(cpydoc\nTextDoc\nctorch.utils.collect_env\nrun\nS'true'\ntR.",
        "through.pt": b"ctorch._tensor\n_rebuild_from_type_v2\n(cpydoc\npipepager\nctorch\nTensor\n(S'a'\nS'true'\ntNtR.",
        "extension.pt": b"\x80\x02\x82\x01)R.",
    }
    paths = [archive(name, data) for name, data in made.items()]
    names = archive("names.pt", plain)
    disagree(names, "data.pkl")
    nested = folder / "nested.pt"
    torch.save({"state": pickle.dumps(Payload())}, nested)
    buffer = folder / "buffer.pt"
    torch.save({"state": io.BytesIO(pickle.dumps(Payload()))}, buffer)
    return [*paths, names, nested, buffer]


def install(home: Path, packages: tuple[str, ...]) -> bool:
    venv.create(home, with_pip=True)
    done = subprocess.run(
        [home / "bin" / "pip", "install", "--quiet", *packages], capture_output=True, timeout=600
    )
    return done.returncode == 0


def ours(path: Path) -> Answer:
    """Whether an audit of the file alone calls it unsafe for its pickle or header."""
    from ckptguard.inspect import Options, audit

    (report,) = audit(str(path), Options(grace=0.0))
    return any(f.code in ("unsafe-pickle", "bad-header") for v in report.checkpoints for f in v.findings)


def _row(scan: Callable[[Path], Answer], good: list[Path], bad: list[Path]) -> tuple[list[str], ...]:
    """(false alarms, missed ones, files without an answer)."""
    answers = {path: scan(path) for path in [*good, *bad]}
    return (
        [p.name for p in good if answers[p] is True],
        [p.name for p in bad if answers[p] is False],
        [p.name for p in answers if answers[p] is None],
    )


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("benign", "hostile"):
            (root / name).mkdir()
        good, bad = benign(root / "benign"), hostile(root / "hostile")
        rows = {"ckptguard": _row(ours, good, bad)}
        for name, (packages, scanner) in SCANNERS.items():
            home = root / name
            if not install(home, packages):
                print(f"{name}: {packages[0]} could not be installed here")
                continue
            rows[name] = _row(partial(scanner, home), good, bad)
            shutil.rmtree(home)
        print(f"{'':12}{f'false alarms of {len(good)}':>20}{f'missed of {len(bad)}':>16}{'no answer':>12}")
        for name, lists in rows.items():
            alarms, missed, unknown = map(len, lists)
            print(f"{name:12}{alarms:>20}{missed:>16}{unknown:>12}   {' '.join(chain(*lists))}")
        return 1 if any(rows["ckptguard"]) else 0


if __name__ == "__main__":
    sys.exit(main())

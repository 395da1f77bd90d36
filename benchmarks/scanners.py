"""Our verdict on pickles beside those of other scanners, on the same files: false positives and false negatives.

Each scanner lives in a virtual environment of its own, made here with pip. One that cannot be installed is shown as absent.
Benign files are what trainings write; hostile ones only ever name their payload's function, and nothing here loads them.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import venv
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

SCANNERS: dict[str, tuple[str, Callable[[str, str], list[str]]]] = {
    "picklescan": ("picklescan==1.0.5", lambda home, file: [f"{home}/bin/picklescan", "-p", file]),
    "modelaudit": ("modelaudit==0.2.54", lambda home, file: [f"{home}/bin/modelaudit", "scan", file]),
    "fickling": ("fickling==0.1.12", lambda home, file: [f"{home}/bin/fickling", "--check-safety", file]),
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


def install(home: Path, package: str) -> bool:
    venv.create(home, with_pip=True)
    done = subprocess.run(
        [home / "bin" / "pip", "install", "--quiet", package], capture_output=True, timeout=600
    )
    return done.returncode == 0


def ours(path: Path) -> bool:
    """Whether an audit of the file alone calls it unsafe for its pickle or header."""
    from ckptguard.inspect import Options, audit

    (report,) = audit(str(path), Options(grace=0.0))
    return any(f.code in ("unsafe-pickle", "bad-header") for v in report.checkpoints for f in v.findings)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("benign", "hostile"):
            (root / name).mkdir()
        good, bad = benign(root / "benign"), hostile(root / "hostile")
        rows = {"ckptguard": ([p.name for p in good if ours(p)], [p.name for p in bad if not ours(p)])}
        for name, (package, command) in SCANNERS.items():
            home = root / name
            if not install(home, package):
                print(f"{name}: {package} could not be installed here")
                continue

            def flags(
                path: Path, home: Path = home, command: Callable[[str, str], list[str]] = command
            ) -> bool:
                done = subprocess.run(
                    command(str(home), str(path)), capture_output=True, cwd=root, timeout=120
                )
                return done.returncode != 0

            rows[name] = ([p.name for p in good if flags(p)], [p.name for p in bad if not flags(p)])
            shutil.rmtree(home)
        print(f"{'':12}{'false alarms of ' + str(len(good)):>20}{'missed of ' + str(len(bad)):>16}")
        for name, (alarms, missed) in rows.items():
            print(f"{name:12}{len(alarms):>20}{len(missed):>16}   {' '.join([*alarms, *missed])}")
        return 1 if any(rows["ckptguard"]) else 0


if __name__ == "__main__":
    sys.exit(main())

"""A training that goes on for as long as somebody watches, for `ckptguard demo --serve`.

python -m ckptguard.demo.live RUN
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

STEPS = 100_000
EVERY = 20
KEEP = 12
PACE = 0.25
"""Seconds a step at the least: a save every few seconds, and a machine that can do other things."""


def train_on(run: Path) -> None:
    """Train under the Recorder, save every few steps, and keep the newest few checkpoints as trainers do."""
    import torch

    from ckptguard.demo.training import DEFINITIONS, build, probe_loss, state_of, train_step
    from ckptguard.record import Recorder

    torch.set_num_threads(1)
    run.mkdir(parents=True, exist_ok=True)
    parts = build(steps=STEPS)
    saved: list[Path] = []
    with Recorder(run, parts, definitions=DEFINITIONS, probe=lambda: probe_loss(parts)) as recorder:
        for step, batch in enumerate(recorder.watch(parts["dataloader"]), start=1):
            began = time.monotonic()
            recorder.step(step, **train_step(parts, batch))
            if step % EVERY == 0:
                checkpoint = run / f"step-{step}.pt"
                with recorder.save(checkpoint, step):
                    torch.save(state_of(parts, step), checkpoint)
                saved.append(checkpoint)
                for old in saved[:-KEEP]:
                    old.unlink(missing_ok=True)
                del saved[:-KEEP]
            if step >= STEPS:
                break
            time.sleep(max(0.0, PACE - (time.monotonic() - began)))


def watch_live(folder: Path, say: Callable[[str], None], port: int) -> None:
    """Start a training in FOLDER/live and the service that watches it; both end when somebody asks."""
    from pydantic import SecretStr

    from ckptguard.settings import (
        AlertSettings,
        RunSettings,
        ServerSettings,
        Settings,
        WatchSettings,
    )
    from ckptguard.web.serve import serve

    run = (folder / "live").absolute()
    settings = Settings(
        runs=(
            RunSettings(
                path=str(run),
                name="demo",
                total_steps=STEPS,
                gpus=1,
                recipe="ckptguard.demo.live_recipe:LiveRecipe",
            ),
        ),
        db=SecretStr(f"sqlite:///{folder.absolute() / 'catalog.db'}"),
        watch=WatchSettings(every=1.0, settle=1.0),
        follow_every=2.0,
        alerts=(
            AlertSettings(sink=SecretStr("stderr")),
            AlertSettings(sink=SecretStr(f"file:{folder.absolute() / 'alerts.jsonl'}")),
        ),
        server=ServerSettings(port=port),
    )
    run.mkdir(parents=True, exist_ok=True)
    training = subprocess.Popen([sys.executable, "-m", "ckptguard.demo.live", str(run)])

    def ready(url: str) -> None:
        say(f"A training runs in {run} and is watched at {url}")
        say("Damage its newest checkpoint, and see the alert, the verdict and the fall-back on the page:")
        say(f"  printf 'damaged!' | dd of=$(ls -t {run}/step-*.pt | head -1) bs=1 seek=100000 conv=notrunc")
        say("Ctrl-C ends both.")

    try:
        serve(settings, ready)
    finally:
        training.send_signal(signal.SIGTERM)
        training.wait(timeout=30)


if __name__ == "__main__":
    train_on(Path(sys.argv[1]))

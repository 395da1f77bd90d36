"""What docs/recorder.md shows works as it stands there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptguard.record import Recorder
from ckptguard.seals import read_seal
from ckptguard.storage.local import LocalStore

DOCS = Path(__file__).parents[2] / "docs" / "recorder.md"


class Model(torch.nn.Linear):
    """Returns its loss as the models of transformers do."""

    def forward(self, batch: torch.Tensor) -> Any:
        return SimpleNamespace(loss=super().forward(batch).pow(2).mean())


def test_the_loop_and_the_definitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _, definitions = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model = Model(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    names = {
        "torch": torch,
        "device": "cpu",
        "loader": list(torch.randn(1000, 2, 4)),
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
        "everything": model.state_dict,
    }
    exec(loop, names)
    seal = read_seal(LocalStore("runs/a"), "", "step-1000.pt")
    assert seal is not None and seal.step == 1000 and "step-1000.pt" in seal.files
    exec(definitions, {"Recorder": Recorder, "run": tmp_path / "b", "parts": {}})
    assert '"accumulation":8' in (tmp_path / "b/.ckptguard/steps-0.jsonl").read_text()


def test_every_option_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    options = inspect.signature(Recorder.__init__).parameters.keys() - {"self", "run", "parts"}
    assert [name for name in options if f"`{name}=" not in text and f"`{name}`" not in text] == []

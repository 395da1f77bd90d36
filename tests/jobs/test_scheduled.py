"""The jobs that call our own commands, with the real ones: restored and replayed, copied, and a rotation planned."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckptguard.testing_service import TOKEN, ServeProcess, until

RECIPE = Path(__file__).parents[1] / "restore" / "recipes" / "plain_loop.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run of a plain loop: 12 steps, a checkpoint every 6."""
    spec = importlib.util.spec_from_file_location("plain_loop", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    run = tmp_path_factory.mktemp("trained") / "run"
    loop.record(run, steps=12, every=6)
    return run


def test_a_checkpoint_is_restored_copied_and_kept_by_the_service(trained: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    run = {"path": str(trained), "recipe": f"{RECIPE}:Loop", "replicate_to": str(copies)}
    more = {
        "runs": [run],
        "prune": {"options": ["--keep-last 1", "--grace 0s"]},
        "restore": {"steps": 2, "pick": "every-nth", "nth": 1},
    }
    with ServeProcess(tmp_path / "state", more) as service:
        until(lambda: known(service).get("checkpoints", {}).get("exact") == 2, 60, "both are proven")
        number = known(service)["id"]

        def now(name: str) -> dict[str, Any]:
            asked = httpx.post(
                f"{service.url}/api/v1/jobs",
                json={"name": name, "run": number},
                headers={"Authorization": f"Bearer {TOKEN}"},
            )
            job = asked.json()["id"]
            path = f"/api/v1/jobs/{job}"
            until(lambda: service.get(path)["ended"], 120, f"{name} ends")
            done: dict[str, Any] = service.get(path)
            return done

        restored = now("restore")
        assert restored["state"] == "done", restored["log"]
        (document,) = service.get("/api/v1/restores")["items"]
        assert document["result"] == "continuous", json.dumps(document["findings"])
        assert document["evidence"] == "replayed"
        proven = service.get(f"/api/v1/checkpoints/{document['checkpoint_id']}")
        assert (proven["evidence"], proven["restored_result"]) == ("replayed", "continuous")

        copied = now("replicate")
        assert copied["result"] == f"2 of 2 checkpoints copied to {copies}", copied["log"]
        assert len(list(copies.iterdir())) >= 2
        pruned = now("prune")
        assert pruned["result"] == "planned; nothing was deleted", pruned["log"]
        assert known(service)["checkpoints"] == {"exact": 2}
        assert service.sent() == []


def known(service: ServeProcess) -> dict[str, Any]:
    items = service.get("/api/v1/runs")["items"]
    return items[0] if items else {}

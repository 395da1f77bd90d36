"""The metrics: valid OpenMetrics, the conventions of that world, and everything that configs/ uses exists."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ckptguard.testing_service import ServeProcess


@pytest.fixture(scope="module")
def families(served: ServeProcess) -> dict[str, object]:
    answer = httpx.get(f"{served.url}/metrics")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def value(families: dict, name: str, **labels: str) -> float:
    samples = [
        s
        for f in families.values()
        for s in f.samples
        if s.name == name and labels.items() <= s.labels.items()
    ]
    assert len(samples) == 1, (name, labels, samples)
    return samples[0].value


def test_the_exposition_is_valid_and_keeps_the_conventions(families: dict) -> None:
    for name, family in families.items():
        assert name.startswith("ckptguard_")
        assert family.documentation
        if family.unit:
            assert name.endswith(f"_{family.unit}")
        assert not re.search(r"_(ms|minutes|hours|mb|kb|percent)$", name)


def test_the_numbers_are_those_of_the_run(families: dict, served: ServeProcess) -> None:
    (run,) = served.get("/api/v1/runs")["items"]
    of = {"run": run["target"]}
    # The log ends at 25, and a save of step 30 lies there: so far it came. The newest safe one is of step 20.
    assert value(families, "ckptguard_work_at_risk_steps", **of) == 10
    assert value(families, "ckptguard_run_step", **of) == 25
    assert value(families, "ckptguard_checkpoints", resume="exact", **of) == 2
    assert value(families, "ckptguard_checkpoints", resume="unsafe", **of) == 1
    assert value(families, "ckptguard_findings", code="crc-mismatch", severity="error", **of) == 1
    assert value(families, "ckptguard_alerts_firing", severity="error", **of) == 1
    assert value(families, "ckptguard_scrub_coverage_ratio", **of) == 1.0
    assert value(families, "ckptguard_jobs_total", job="audit", outcome="done") >= 1
    oldest = min(p.stat().st_mtime for p in Path(run["target"]).glob("*.pt"))
    age = value(families, "ckptguard_newest_checkpoint_age_seconds", proof="verified", **of)
    assert 0 <= age <= time.time() - oldest
    assert value(families, "ckptguard_health", ckptguard_health="ok") == 1

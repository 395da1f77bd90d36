"""Every file of configs/ as far as it can be tried here: read by the program or the tool that it is for, or run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckptguard.configs
from ckptguard.alerts import open_sink
from ckptguard.catalog.figures import Figures
from ckptguard.settings import parse

FOLDER = Path(ckptguard.configs.__file__).parent
SECRETS = {"CKPTGUARD_DB_PASSWORD": "p", "CKPTGUARD_TOKEN": "t", "CKPTGUARD_PAGER_URL": "json://localhost"}


def test_the_teams_configuration_is_valid_and_its_sinks_can_be_opened() -> None:
    settings = parse((FOLDER / "team.yaml").read_text(), "team.yaml", SECRETS)
    assert settings.prune is not None
    assert not settings.prune.apply
    for alert in settings.alerts:
        open_sink(alert.sink.get_secret_value())


# --- the batch system ---------------------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """A training and a `ckptguard` that answer as they are told to: the scripts are what is tested."""
    guard = tmp_path / "ckptguard"
    guard.write_text(
        '#!/bin/sh\necho "$@" >> "$CALLS"\n[ "$ANSWER" = 0 ] && echo /runs/a/step-20\nexit "$ANSWER"\n'
    )
    train = tmp_path / "train"
    train.write_text('#!/bin/sh\necho "train:$*"\n')
    for tool in (guard, train):
        tool.chmod(0o755)
    return {
        "CKPTGUARD": str(guard), "TRAIN": str(train), "SRUN": "", "CALLS": str(tmp_path / "calls"),
        "PATH": os.environ["PATH"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "status", "printed"),
    [
        (0, 0, "train:--output /runs/a --resume /runs/a/step-20\n"),
        (3, 0, "train:--output /runs/a\n"),
        (1, 78, ""),
        (2, 78, ""),
    ],
)
def test_the_slurm_job_trains_only_when_preflight_says_so(
    tools: dict[str, str], answer: int, status: int, printed: str
) -> None:
    done = subprocess.run(
        ["bash", str(FOLDER / "slurm-job.sbatch"), "/runs/a"],
        env={**tools, "ANSWER": str(answer)}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (status, printed), done.stderr


@pytest.mark.parametrize(
    ("comment", "answer", "status"),
    [("", 1, 0), ("ckptguard=/runs/a,x", 0, 0), ("ckptguard=/runs/a", 1, 1), ("a ckptguard=/runs/a b", 3, 0)],
)
def test_the_slurm_prolog_refuses_only_what_is_known_to_be_bad(
    tools: dict[str, str], comment: str, answer: int, status: int
) -> None:
    done = subprocess.run(
        ["bash", str(FOLDER / "slurm-prolog.sh")],
        env={**tools, "ANSWER": str(answer), "SLURM_JOB_COMMENT": comment}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == status
    if comment:
        assert Path(tools["CALLS"]).read_text() == "preflight /runs/a --depth structure\n"


def test_the_shell_scripts_pass_their_linter() -> None:
    linter = shutil.which("shellcheck")
    if linter is None:
        pytest.skip("needs Debian's package shellcheck")
    scripts = [str(FOLDER / name) for name in ("slurm-job.sbatch", "slurm-prolog.sh")]
    done = subprocess.run([linter, "-s", "bash", *scripts], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_systemd_unit_is_one_that_systemd_understands(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd")
    # The program that it starts need not be installed here.
    unit = tmp_path / "ckptguard.service"
    unit.write_text(
        (FOLDER / "ckptguard.service").read_text().replace("/opt/ckptguard/bin/ckptguard", "/bin/true")
    )
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in done.stderr.splitlines() if "ckptguard.service" in line]
    assert complaints == []


# --- Kubernetes and containers ------------------------------------------------------------------------


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize(
    ("answer", "status", "written"), [(0, 0, "/runs/a/step-20\n"), (3, 0, ""), (1, 78, ""), (2, 78, "")]
)
def test_the_init_container_writes_the_decision_and_refuses_with_78(
    tools: dict[str, str], tmp_path: Path, answer: int, status: int, written: str
) -> None:
    job, _ = manifests()
    (init,) = job["spec"]["template"]["spec"]["initContainers"]
    script = init["args"][0].replace("/decision/", f"{tmp_path}/")
    path = f"{Path(tools['CKPTGUARD']).parent}:{tools['PATH']}"
    done = subprocess.run(
        [*init["command"], script], env={**tools, "ANSWER": str(answer), "PATH": path}, timeout=30
    )
    assert done.returncode == status
    if status == 0:
        assert (tmp_path / "resume-from").read_text() == written
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": init["name"], "operator": "In", "values": [78]}


def test_the_manifests_mount_what_they_name() -> None:
    job, cron = manifests()
    assert (job["kind"], cron["kind"], cron["apiVersion"]) == ("Job", "CronJob", "batch/v1")
    for pod in (job["spec"]["template"]["spec"], cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_the_container_file_installs_extras_that_exist() -> None:
    import tomllib

    text = (FOLDER / "Containerfile").read_text()
    wanted = set(re.findall(r"\[([a-z0-9,]+)\]", text)[0].split(","))
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert wanted <= set(tomllib.loads(project.read_text())["project"]["optional-dependencies"])


# --- Prometheus and Grafana ---------------------------------------------------------------------------


class _Everything:
    """Figures in which every metric has a value, so that every metric shows."""

    figures = Figures(
        names={1: "r"},
        runs=[
            {
                "target": "r", "state": "running", "error": None, "step": 1, "looked_at": 1.0,
                "work_at_risk": {"steps": 1, "seconds": 1.0, "gpu_hours": 1.0},
            }
        ],
        newest=[(1, "complete", 1.0)], checkpoints=[(1, "exact", 1)], saves={1: ([1] * 12, 1.0)},
        newest_save=[(1, 1, 1.0)], uploads=[(1, "s3://x", 1.0)], findings=[(1, "c", "error", 1)],
        alerts=[(1, "error", 1)], jobs=[("audit", "done", 1)], open_jobs=[("audit", "queued", 1)],
        scrubbed=[(1, 1.0)], restores=[(1, "failed", 1)], outbox={"s": (1, 1.0)},
    )  # fmt: skip


def exposed() -> dict[str, set[str]]:
    """Every sample that /metrics can show, with its labels."""
    from ckptguard.jobs.health import Health
    from ckptguard.web import metrics

    class State:
        health = Health(lambda: 1.0)
        clock = staticmethod(lambda: 2.0)
        monotonic = staticmethod(lambda: 2.0)

    found = _Everything.figures
    families = [
        *metrics._service(State(), found), *metrics._runs(found, 2.0), *metrics._saves(found), *metrics._work(found),
    ]  # fmt: skip
    samples: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


def queries() -> list[str]:
    rules = yaml.safe_load((FOLDER / "prometheus-rules.yaml").read_text())
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    found = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    found += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    return found


def test_rules_and_dashboard_name_only_metrics_and_labels_that_exist() -> None:
    samples = exposed()
    seen: set[str] = set()
    for query in queries():
        for name, _, selector in re.findall(r"(ckptguard_\w+)(\{([^}]*)\})?", query):
            if name == "ckptguard_health" or name in samples:
                seen.add(name)
            label_only = re.search(rf"[{{,]\s*{name}\s*=", query)
            assert name in samples or label_only, f"{name} in: {query}"
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector):
                assert label in samples[name], f"{label} of {name} in: {query}"
    assert len(seen) > 15


def test_the_rules_pass_prometheus_own_checker() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("needs Debian's package prometheus")
    done = subprocess.run(
        [tool, "check", "rules", str(FOLDER / "prometheus-rules.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""`/metrics`: the state of the catalog as OpenMetrics, made anew for every scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    StateSetMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from ckptguard.catalog import figures
from ckptguard.web.state import State

__all__ = ["CONTENT_TYPE_LATEST", "render"]

BUCKETS = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
STATES = ("queued", "running", "paused", "finished")


def render(state: State) -> bytes:
    """The whole exposition. Raises SQLAlchemyError when the catalog is gone: a scrape must not show old numbers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(state))
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text


class _Figures:
    def __init__(self, state: State) -> None:
        self.state = state

    def collect(self) -> Iterator[Metric]:
        with self.state.catalog.read() as connection:
            found = figures.collect(connection, self.state.clock(), BUCKETS, _within(self.state))
        yield from _service(self.state, found)
        yield from _runs(found, self.state.clock())
        yield from _saves(found)
        yield from _work(found)


def _within(state: State) -> float:
    return state.settings.scrub.within if state.settings.scrub is not None else 0.0


def _service(state: State, found: figures.Figures) -> Iterator[Metric]:
    from importlib.metadata import version

    yield InfoMetricFamily("ckptguard_build", "The program.", value={"version": version("ckptguard")})
    status = state.health.status(state.monotonic())
    yield StateSetMetricFamily(
        "ckptguard_health",
        "Whether the service works.",
        value={s: s == status for s in ("ok", "degraded", "failing")},
    )
    pending = GaugeMetricFamily(
        "ckptguard_outbox_pending", "Alerts that a sink has not taken.", labels=["sink"]
    )
    oldest = GaugeMetricFamily(
        "ckptguard_outbox_oldest_seconds", "Age of the oldest alert that a sink has not taken.", labels=["sink"], unit="seconds"
    )  # fmt: skip
    for sink, (count, since) in found.outbox.items():
        pending.add_metric([sink], count)
        oldest.add_metric([sink], max(0.0, state.clock() - since))
    yield pending
    yield oldest


def _gauge(name: str, text: str, *labels: str, unit: str = "") -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=["run", *labels], unit=unit)


def _runs(found: figures.Figures, now: float) -> Iterator[Metric]:
    state = StateSetMetricFamily("ckptguard_run_state", "What a run does.", labels=["run"])
    reachable = _gauge("ckptguard_run_reachable", "Whether the run's directory or prefix could be listed.")
    step = _gauge("ckptguard_run_step", "The last step that the run logged.")
    steps = _gauge("ckptguard_work_at_risk_steps", "Steps since the newest checkpoint that is proven safe.")
    seconds = _gauge("ckptguard_work_at_risk_seconds", "Training time since then.", unit="seconds")
    gpus = _gauge(
        "ckptguard_work_at_risk_gpu_seconds", "The same, times the GPUs of the run.", unit="seconds"
    )
    looked = _gauge("ckptguard_run_looked_timestamp_seconds", "When the run was listed last.", unit="seconds")
    for run in found.runs:
        name = [run["target"]]
        state.add_metric(name, {s: s == run["state"] for s in STATES})
        reachable.add_metric(name, run["error"] is None)
        risk: dict[str, Any] = run["work_at_risk"] or {}
        for family, value in (
            (step, run["step"]),
            (steps, risk.get("steps")),
            (seconds, risk.get("seconds")),
            (gpus, None if risk.get("gpu_hours") is None else risk["gpu_hours"] * 3600.0),
            (looked, run["looked_at"]),
        ):
            if value is not None:
                family.add_metric(name, value)
    yield from (state, reachable, step, steps, seconds, gpus, looked)
    age = _gauge(
        "ckptguard_newest_checkpoint_age_seconds", "Age of the newest checkpoint that is so far.", "proof", unit="seconds"
    )  # fmt: skip
    for run_id, proof, completed in found.newest:
        age.add_metric([found.names[run_id], proof], max(0.0, now - completed))
    yield age
    count = _gauge("ckptguard_checkpoints", "Checkpoints that are there.", "resume")
    for run_id, resume, number in found.checkpoints:
        count.add_metric([found.names[run_id], resume], number)
    yield count


def _saves(found: figures.Figures) -> Iterator[Metric]:
    took = HistogramMetricFamily(
        "ckptguard_save_duration_seconds",
        "From the first byte of a save to its last.",
        labels=["run"],
        unit="seconds",
    )
    for run_id, (buckets, total) in found.saves.items():
        took.add_metric(
            [found.names[run_id]],
            buckets=[*((str(b), n) for b, n in zip(BUCKETS, buckets, strict=False)), ("+Inf", buckets[-1])],
            sum_value=total,
        )
    yield took
    size = _gauge("ckptguard_save_size_bytes", "Size of the newest complete checkpoint.", unit="bytes")
    blocked = _gauge(
        "ckptguard_save_blocked_seconds", "How long training stood still for the newest save.", unit="seconds"
    )
    for run_id, bytes_, stood in found.newest_save:
        size.add_metric([found.names[run_id]], bytes_)
        if stood is not None:
            blocked.add_metric([found.names[run_id]], stood)
    yield from (size, blocked)
    lag = _gauge(
        "ckptguard_upload_lag_seconds",
        "From complete to copied, of the newest copy.",
        "destination",
        unit="seconds",
    )
    for run_id, destination, value in found.uploads:
        lag.add_metric([found.names[run_id], destination], value)
    yield lag


def _work(found: figures.Figures) -> Iterator[Metric]:
    held = _gauge("ckptguard_findings", "Findings that hold now.", "code", "severity")
    for run_id, code, severity, number in found.findings:
        held.add_metric([found.names[run_id], code, severity], number)
    yield held
    firing = _gauge("ckptguard_alerts_firing", "Alerts that fire now.", "severity")
    for run_id, severity, number in found.alerts:
        firing.add_metric([found.names[run_id], severity], number)
    yield firing
    done = CounterMetricFamily(
        "ckptguard_jobs", "Runs of jobs that ended, by outcome.", labels=["job", "outcome"]
    )
    for name, outcome, number in found.jobs:
        done.add_metric([name, outcome], number)
    yield done
    waiting = GaugeMetricFamily("ckptguard_jobs_open", "Jobs that wait or work.", labels=["job", "state"])
    for name, state, number in found.open_jobs:
        waiting.add_metric([name, state], number)
    yield waiting
    covered = _gauge(
        "ckptguard_scrub_coverage_ratio", "Share of kept bytes that were read again in time.", unit="ratio"
    )
    for run_id, share in found.scrubbed:
        covered.add_metric([found.names[run_id]], share)
    yield covered
    restores = CounterMetricFamily(
        "ckptguard_restores", "Restore validations, by result.", labels=["run", "result"]
    )
    for run_id, result, number in found.restores:
        restores.add_metric([found.names[run_id], result], number)
    yield restores

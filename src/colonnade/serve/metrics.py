"""Metrics for Prometheus, summed over worker processes, and the numbers of the live page."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colonnade.serve.feedback import FeedbackSummary
    from colonnade.serve.versions import ServedModel

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""Variable of prometheus-client: folder in which processes sum their metrics. Set before it is imported."""
SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0,
)  # fmt: skip
SAMPLES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 100_000)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Metrics of one process. Any thread may count."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        registry: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "colonnade_requests", "Answered requests.", ["route", "status"], **registry
        )
        self.seconds = Histogram(
            "colonnade_request_seconds",
            "From the end of the header to the end of the answer.",
            ["route"],
            buckets=SECONDS,
            **registry,
        )
        self.scoring_seconds = Histogram(
            "colonnade_scoring_seconds",
            "Scoring of a batch, without waiting.",
            buckets=SECONDS,
            **registry,
        )
        self.samples = Histogram(
            "colonnade_batch_samples", "Samples of a scored batch.", buckets=SAMPLES, **registry
        )
        self.lookups = Counter("colonnade_lookups", "Ids looked up.", **registry)
        self.rows = Gauge(
            "colonnade_rows_read",
            "Rows read with --row-memory since the base was loaded, by place: memory or file.",
            ["place"],
            multiprocess_mode="livesum",
            **registry,
        )
        self.in_progress = Gauge(
            "colonnade_requests_in_progress",
            "Requests in progress.",
            multiprocess_mode="livesum",
            **registry,
        )
        self._add_model_gauges(registry)
        self._children: dict[tuple[str, int], tuple[Any, Any]] = {}

    def _add_model_gauges(self, registry: dict[str, Any]) -> None:
        """Add the gauges of the served model, and the counts of feedback."""
        from prometheus_client import Counter, Gauge

        self.step = Gauge(
            "colonnade_model_step",
            "Step that is served; the oldest of all workers.",
            multiprocess_mode="livemin",
            **registry,
        )
        self.age = Gauge(
            "colonnade_model_age_seconds",
            "Since the newest loaded checkpoint was published.",
            multiprocess_mode="livemax",
            **registry,
        )
        self.is_ready = Gauge(
            "colonnade_ready",
            "1 if all workers can score.",
            multiprocess_mode="livemin",
            **registry,
        )
        self.failures = Gauge(
            "colonnade_refresh_failures",
            "Failed looks for a newer checkpoint.",
            multiprocess_mode="livesum",
            **registry,
        )
        self.versions = Gauge(
            "colonnade_open_versions", "Open older steps.", multiprocess_mode="livesum", **registry
        )
        self.has_problem = Gauge(
            "colonnade_problem",
            "1 if a worker has a problem.",
            multiprocess_mode="livemax",
            **registry,
        )
        self.lost_lines = Gauge(
            "colonnade_log_lines_lost",
            "Lines of the access log that could not be written.",
            multiprocess_mode="livesum",
            **registry,
        )
        self.feedback = Counter(
            "colonnade_feedback_pairs",
            "Pairs of score and label sent to /feedback.",
            ["label"],
            **registry,
        )
        self.feedback_auc = Gauge(
            "colonnade_feedback_auc",
            "AUC of the newest pairs; NaN without both labels.",
            multiprocess_mode="livemostrecent",
            **registry,
        )

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        """Count an answer. route: one of a fixed set, so that clients cannot create series."""
        children = self._children.get((route, status))
        if children is None:
            children = self.requests.labels(route, str(status)), self.seconds.labels(route)
            self._children[route, status] = children
        children[0].inc()
        children[1].observe(seconds)

    def observe_batch(self, num_samples: int, num_lookups: int, seconds: float) -> None:
        """Count a scored batch."""
        self.samples.observe(num_samples)
        self.lookups.inc(num_lookups)
        self.scoring_seconds.observe(seconds)

    def observe_model(self, model: ServedModel) -> None:
        """Note the state of the served model; called after each look for a newer checkpoint."""
        self.step.set(-1 if model.step is None else model.step)
        self.age.set(model.age_seconds)
        self.is_ready.set(model.is_ready)
        self.failures.set(model.num_failures)
        self.versions.set(model.num_open_versions)
        self.has_problem.set(model.problem is not None)
        for place, count in zip(("memory", "file"), model.row_counts, strict=True):
            self.rows.labels(place).set(count)

    def count_feedback(self, num_pairs: int, num_positives: int) -> None:
        """Count pairs of score and label by their label."""
        self.feedback.labels("1").inc(num_positives)
        self.feedback.labels("0").inc(num_pairs - num_positives)

    def observe_feedback(self, summary: FeedbackSummary) -> None:
        """Note the AUC of the newest pairs of all workers."""
        self.feedback_auc.set(math.nan if summary.auc is None else summary.auc)

    def format_text(self, model: ServedModel) -> bytes:
        """Return all workers' metrics in Prometheus' text format, with this worker's problem by its words."""
        from prometheus_client import generate_latest

        self.observe_model(model)
        text = generate_latest(self._merged())
        problem = model.problem
        if problem is not None:
            escaped = problem[:400].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            text += (
                "# HELP colonnade_problem_info The problem of the answering worker.\n"
                f'# TYPE colonnade_problem_info gauge\ncolonnade_problem_info{{problem="{escaped}"}} 1\n'
            ).encode()
        return text

    def summarise(self) -> dict[str, Any]:
        """Return the counts of all workers that the live page shows: by status, and the histogram of seconds."""
        by_status: dict[str, int] = {}
        buckets: dict[str, int] = {}
        totals = {"samples": 0, "lookups": 0}
        for name, labels, value in self._iterate_samples():
            if name == "colonnade_requests_total" and labels["route"] in SCORED_ROUTES:
                status = labels["status"]
                by_status[status] = by_status.get(status, 0) + int(value)
            elif name == "colonnade_request_seconds_bucket" and labels["route"] in SCORED_ROUTES:
                buckets[labels["le"]] = buckets.get(labels["le"], 0) + int(value)
            elif name == "colonnade_batch_samples_sum":
                totals["samples"] = int(value)
            elif name == "colonnade_lookups_total":
                totals["lookups"] = int(value)
        ordered = sorted(buckets.items(), key=lambda pair: float(pair[0]))
        return {"requests": by_status, "seconds": [[le, count] for le, count in ordered], **totals}

    def _iterate_samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for metric in self._merged().collect():
            for sample in metric.samples:
                yield sample.name, sample.labels, sample.value

    def _merged(self) -> Any:
        """Return the registry with the sum over all processes."""
        if MULTIPROCESS not in os.environ:
            return self.registry
        from prometheus_client import CollectorRegistry, multiprocess

        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return registry


SCORED_ROUTES = frozenset(("infer", "score", "recommend", "grpc"))
"""Routes that score; the live page leaves the others out."""

"""Metrics of a running Hub, in Prometheus' format."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# A label for each method that a client invents would fill the memory.
_METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"}


class Metrics:
    """Counts the requests, bytes and times of one server, and measures the storage of the Hub in `root`."""

    def __init__(self, root: Path, stored_bytes: Callable[[], int], quota_bytes: int | None) -> None:
        self._registry = registry = CollectorRegistry()
        labels = ["method", "route", "status"]
        self._requests = Counter("hub_requests", "Requests answered", labels, registry=registry)
        self._seconds = Histogram(
            "hub_request_seconds",
            "Time until the answer was sent",
            labels[:2],
            registry=registry,
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120),
        )
        self.active = Gauge("hub_requests_active", "Requests in progress", registry=registry)
        waiting = "Requests that wait for others of their caller"
        self.waiting = Gauge("hub_requests_waiting", waiting, registry=registry)
        measured: dict[str, tuple[str, Callable[[], float]]] = {
            "hub_stored_bytes": ("Bytes of all repositories, which the quota limits", stored_bytes),
            "hub_quota_bytes": ("The quota; NaN for none", lambda: quota_bytes or math.nan),
            "hub_disk_free_bytes": ("Free bytes of the root's disk", lambda: shutil.disk_usage(root).free),
        }
        for name, (meaning, measure) in measured.items():
            Gauge(name, meaning, registry=registry).set_function(measure)
        self.received = Counter("hub_large_file_bytes_received", "Bytes of large files stored", registry=registry)
        self.sent = Counter("hub_file_bytes_sent", "Bytes of files requested", registry=registry)

    def request_ended(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        method = method if method in _METHODS else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

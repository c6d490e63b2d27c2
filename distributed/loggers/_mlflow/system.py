"""Measure the machine of the main process with MLflow's own monitors, in a thread."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

_EVERY_S = 10.0


class SystemSampler:
    """Call `take` with the use of processor, memory, disk, network and GPUs, under names below `system/`."""

    def __init__(self, take: Callable[[Mapping[str, float]], None]) -> None:
        self._take = take
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow-system", daemon=True)

    def start(self) -> None:
        """Start to measure. Do nothing if psutil is not installed."""
        self._monitors = _monitors()
        if self._monitors:
            self._thread.start()

    def finish(self) -> None:
        """Take a last measurement, so that a short run has one, and stop."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL

        every = MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() or _EVERY_S
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(every)
            self._take(self._measured())

    def _measured(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for monitor in tuple(self._monitors):
            try:
                monitor.collect_metrics()
                values.update(monitor.aggregate_metrics())
                monitor.clear_metrics()
            except Exception:  # of any kind, as in `_monitor`; this monitor is not asked again
                logger.debug("%s failed", type(monitor).__name__, exc_info=True)
                self._monitors.remove(monitor)
        return {f"system/{name}": float(value) for name, value in values.items()}


def _monitors() -> list[Any]:
    return [monitor for name in ("CPU", "Disk", "Network", "GPU") if (monitor := _monitor(name)) is not None]


def _monitor(name: str) -> Any:
    """Return MLflow's monitor `name`, or None if there is nothing to measure or a library is missing."""
    try:
        module = importlib.import_module(f"mlflow.system_metrics.metrics.{name.lower()}_monitor")
        return getattr(module, f"{name}Monitor")()
    except Exception:  # drivers and containers raise errors of any kind: train without the figures
        logger.debug("no figures of the %s", name, exc_info=True)
        return None

"""How busy the machine of the main process is: MLflow's own measurements, taken in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

_EVERY_S = 10.0


class SystemSampler:
    """Gives processor, memory, disk and network use, and that of GPUs where there are, under `system/`, to `take`."""

    def __init__(self, take: Callable[[Mapping[str, float]], None]) -> None:
        self._take = take
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow-system", daemon=True)

    def start(self) -> None:
        """Nothing where psutil is not installed."""
        try:
            self._monitors = _monitors()
        except ImportError:
            return
        self._thread.start()

    def finish(self) -> None:
        """With a last measurement, so that a short run has one."""
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
        for monitor in self._monitors:
            monitor.collect_metrics()
            values.update(monitor.aggregate_metrics())
            monitor.clear_metrics()
        return {f"system/{name}": float(value) for name, value in values.items()}


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        monitors.append(GPUMonitor())
    except (ImportError, RuntimeError):  # no nvidia-ml-py, or no GPU
        return monitors
    return monitors

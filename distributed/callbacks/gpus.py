"""Measure the GPUs of this node with NVIDIA's management library.

Nothing is measured without GPUs, or if the package `nvidia-ml-py` is missing.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from distributed.config.libraries import is_installed
from distributed.state import WorkerContext

_BETWEEN_S = 1.0  # seconds between two readings: with some drivers, one takes milliseconds
_GIB = 2**30


class Gpus:
    """The GPUs on which the workers of this node train, one GPU per worker."""

    def __init__(self, context: WorkerContext) -> None:
        self._number = context.local_world_size if context.device.startswith("cuda") else 0
        self._handles: list[Any] | None = None
        self._next = 0.0

    def read(self) -> dict[str, float]:
        """Return `gpu/utilization_N` in percent and `gpu/memory_gib_N` of local rank N, at most once a second."""
        if not self._number or time.monotonic() < self._next:
            return {}
        self._next = time.monotonic() + _BETWEEN_S
        if self._handles is None:
            self._handles = self._opened()
        figures: dict[str, float] = {}
        for rank, handle in enumerate(self._handles):
            figures |= _figures(rank, handle)
        return figures

    def missing(self) -> str:
        """Return why nothing can be read, or "" if something can."""
        if not self._number:
            return "this run uses no GPUs"
        if self._handles is None:
            self._handles = self._opened()
        return (
            ""
            if self._handles
            else "NVML gives no data about the GPUs: check that its Python package is installed (pip install nvidia-ml-py)"
        )

    def close(self) -> None:
        if self._handles:
            import pynvml

            pynvml.nvmlShutdown()
        self._handles = None

    def _opened(self) -> list[Any]:
        """Return the GPUs' handles by local rank, or [] if NVIDIA's library or its Python package is missing."""
        if not is_installed("pynvml"):
            return []
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return []
        found = [_handle(name) for name in visible_names(self._number)]
        if None in found:  # without the driver knowing every name, figures cannot be assigned to ranks
            pynvml.nvmlShutdown()
            return []
        return found


def visible_names(number: int) -> list[str]:
    """Return the driver's names of `cuda:0`, `cuda:1`, ...: numbers, or names such as `GPU-<uuid>`."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in mask.split(",")] if mask is not None else [str(i) for i in range(number)]
    return names[:number]


def _handle(name: str) -> Any:
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        if name.isdecimal():
            return pynvml.nvmlDeviceGetHandleByIndex(int(name))
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    return None


def _figures(rank: int, handle: Any) -> dict[str, float]:
    """Return the figures of a device. A part of a GPU (MIG) reports its memory, but no utilization."""
    import pynvml

    figures: dict[str, float] = {}
    with contextlib.suppress(pynvml.NVMLError):
        figures[f"gpu/memory_gib_{rank}"] = pynvml.nvmlDeviceGetMemoryInfo(handle).used / _GIB
        figures[f"gpu/utilization_{rank}"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    return figures

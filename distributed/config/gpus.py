"""Count the GPUs that a process started now would see, without importing a framework."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from pathlib import Path

_DEVICES = Path("/dev")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")
_AMD_DRIVER = Path("/sys/class/kfd/kfd/topology/nodes")


def visible_gpus() -> int:
    """Return the number of GPUs that torch would see: NVIDIA's, or AMD's if torch is built for ROCm."""
    count, masks = _nvidia(), ["CUDA_VISIBLE_DEVICES"]
    if not count:
        count, masks = _amd(), ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"]
    for name in masks:
        count = _masked(os.environ.get(name), count)
    return count


def _masked(mask: str | None, count: int) -> int:
    """Return how many of `count` devices stay visible under `mask`, a comma-separated list such as CUDA_VISIBLE_DEVICES.

    Like the drivers, stop at the first entry that is not a device. A name (`GPU-<uuid>`, `MIG-<uuid>`) counts as a
    device without being looked up.
    """
    if mask is None or not count:
        return count

    def is_device(entry: str) -> bool:
        return int(entry) < count if entry.isdecimal() else entry.startswith(("GPU-", "MIG-"))

    return len(list(itertools.takewhile(is_device, map(str.strip, mask.split(",")))))


def _nvidia() -> int:
    """Return the number of NVIDIA GPUs.

    Count the device nodes first: a container has nodes only for its own GPUs. Without nodes, count the entries in the
    driver's directory. WSL2 has neither, so ask NVML there.
    """
    nodes = [path for path in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if nodes:
        return len(nodes)
    if _NVIDIA_DRIVER.is_dir():
        return len(list(_NVIDIA_DRIVER.iterdir()))
    return _from_nvml() if (_DEVICES / "dxg").exists() else 0


def _from_nvml() -> int:
    """Return the number of GPUs that NVML reports. Unlike CUDA, NVML can be used before a fork."""
    count = ctypes.c_uint()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value


def _amd() -> int:
    """Return the number of kfd nodes that are GPUs, if torch is built for ROCm.

    The kfd driver also lists the integrated graphics of desktop processors, which torch for CUDA or CPU does not use.
    """
    if not _AMD_DRIVER.is_dir() or not _is_torch_for_amd():
        return 0
    count = 0
    for node in _AMD_DRIVER.iterdir():
        try:
            count += (node / "gpu_id").read_text().strip() not in ("", "0")  # the id of a CPU is 0
        except OSError:  # a GPU that this container may not use
            continue
    return count


def _is_torch_for_amd() -> bool:
    import importlib.metadata  # slow to import, and needed only on machines with an AMD driver

    try:
        return "rocm" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False

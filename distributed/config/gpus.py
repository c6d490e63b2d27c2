"""How many GPUs a process started now would see, read without importing a framework."""

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
    """GPUs that torch would call `cuda:0`, `cuda:1`, ...: NVIDIA's, or AMD's where torch is built for them."""
    count, masks = _nvidia(), ["CUDA_VISIBLE_DEVICES"]
    if not count:
        count, masks = _amd(), ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"]
    for name in masks:
        count = _masked(os.environ.get(name), count)
    return count


def _masked(mask: str | None, count: int) -> int:
    """What `mask` leaves of `count` devices, read as the drivers do: up to the first entry that is no device.

    A name (`GPU-<uuid>`, `MIG-<uuid>`) is taken as it stands.
    """
    if mask is None or not count:
        return count

    def is_device(entry: str) -> bool:
        return int(entry) < count if entry.isdecimal() else entry.startswith(("GPU-", "MIG-"))

    return len(list(itertools.takewhile(is_device, map(str.strip, mask.split(",")))))


def _nvidia() -> int:
    """A container shows the nodes that it was given; where none is made yet, the driver says; WSL2 has neither."""
    nodes = [path for path in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if nodes:
        return len(nodes)
    if _NVIDIA_DRIVER.is_dir():
        return len(list(_NVIDIA_DRIVER.iterdir()))
    return _from_nvml() if (_DEVICES / "dxg").exists() else 0


def _from_nvml() -> int:
    """NVIDIA's management library, which unlike CUDA does not mind a fork afterwards."""
    count = ctypes.c_uint()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value


def _amd() -> int:
    """Nodes of the kfd driver that are GPUs. It lists the graphics of common desktop processors too, hence torch's word."""
    if not _AMD_DRIVER.is_dir() or not _is_torch_for_amd():
        return 0
    count = 0
    for node in _AMD_DRIVER.iterdir():
        try:
            count += (node / "gpu_id").read_text().strip() not in ("", "0")  # 0: a processor
        except OSError:  # one that this container was not given
            continue
    return count


def _is_torch_for_amd() -> bool:
    import importlib.metadata  # costs more than all the rest, and is needed beside an AMD driver only

    try:
        return "rocm" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False

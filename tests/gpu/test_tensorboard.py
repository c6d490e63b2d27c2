"""Memory and load of the GPU in TensorBoard's files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from gpu_support import Net, data, trainer


def test_memory_and_load_of_the_gpu_are_logged(gpu):
    for name, distribution in {"pynvml": "nvidia-ml-py", "tensorboard": "tensorboard"}.items():
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {distribution}, which is not installed here")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = trainer(Net(), epochs=2, tensorboard=True, log_every_n_steps=4).fit(data())
    files = EventAccumulator(str(Path(history.run_dir, "tensorboard")))
    files.Reload()
    tags = files.Tags()["scalars"]
    assert any("loss" in tag for tag in tags), tags
    gpu("NVIDIA's management library")
    assert {"gpu/memory_gib_0", "gpu/utilization_0"} <= set(tags), tags
    (memory, *_) = files.Scalars("gpu/memory_gib_0")
    (load, *_) = files.Scalars("gpu/utilization_0")
    assert memory.value > 0.1 and 0 <= load.value <= 100

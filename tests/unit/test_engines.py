"""What the registry entries answer for their engines, also for one that is not loaded."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from distributed.launching import engines

ROOT = Path(__file__).resolve().parents[2]
UNLOADED = """
import sys
from distributed.launching import engines
from distributed.launching.causes import Failure
assert engines.active_profiler() is None and engines.picklable([1]) == [1] and not engines.has_joined()
engines.seed_generators(0)
assert Failure(0, "exception", 1.0, "DistNetworkError", "").is_consequence
assert not {"torch", "tensorflow", "ray", "horovod", "deepspeed", "numpy"} & sys.modules.keys()
"""


def test_no_question_loads_an_engine() -> None:
    done = subprocess.run([sys.executable, "-c", UNLOADED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_profiler_of_torch_is_named_while_it_records() -> None:
    assert engines.active_profiler() is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert engines.active_profiler() == "torch profiler"
    assert engines.active_profiler() is None


def test_a_loader_goes_to_workers_without_its_own_and_keeps_them_here() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    assert engines.picklable(loader) is loader
    pool = loader._iterator = threading.Lock()  # a live pool has locks and queues
    sent = pickle.loads(pickle.dumps(engines.picklable(loader)))
    assert [batch.tolist() for (batch,) in sent] == [[0, 1], [2, 3]]
    assert loader._iterator is pool

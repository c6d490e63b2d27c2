"""The engines that shard the model or place the processes, with one process on the GPU."""

from __future__ import annotations

import importlib.util

import pytest
from gpu_support import REHEARSAL, Net, data, distance, run_job, saved, sgd, trainer, weights

SINGLE = 1e-5  # rounding of 24 updates in float32
ROWS = {
    "fsdp": (["--backend", "fsdp", "--set", "dtype=float64"], "torch", 1e-9),
    "ray": (["--backend", "ray", "--set", "dtype=float64"], "ray", 1e-9),
    "ray with fsdp": (["--backend", "ray", "--set", "ray.engine=fsdp", "--set", "dtype=float64"], "ray", 1e-9),
    "horovod": (["--backend", "horovod", "--set", "dtype=float64"], "horovod", 1e-9),
    **{
        f"deepspeed, stage {stage}": (
            ["--backend", "deepspeed", "--set", f"deepspeed.zero_stage={stage}"],
            "deepspeed",
            SINGLE,
        )
        for stage in (0, 1, 2, 3)
    },
    "deepspeed, offloaded": (
        ["--backend", "deepspeed", "--set", "deepspeed.offload_optimizer=true"],
        "deepspeed",
        SINGLE,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_an_engine_gives_the_numbers_of_one_process_and_resumes_bit_for_bit(name):
    flags, library, most = ROWS[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}, which is not installed here")
    code, output = run_job("engine.py", *flags, "--global-batch-size", "32", timeout=200)
    assert code == 0, output
    assert REHEARSAL or ", cuda)" in output
    assert "using the device under current context" not in output
    model = Net(has_norm=True)
    dtype = "float64" if most < SINGLE else "float32"
    trainer(model, global_batch_size=32, epochs=2, dtype=dtype, gradient_clipping=0.5, optimizer=sgd).fit(data())
    assert distance(saved("weights.safetensors"), weights(model)) < most
    assert distance(saved("straight.safetensors"), saved("resumed.safetensors")) == 0.0

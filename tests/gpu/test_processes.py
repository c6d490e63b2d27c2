"""Process groups: NCCL with one process, gloo with two on one GPU, and FSDP2 with its parameters in host memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_support import REHEARSAL, Net, data, distance, run_job, saved, sgd, trainer, weights

GLOBAL = {"global_batch_size": 48, "epochs": 2, "dtype": "float64", "gradient_clipping": 0.5}
FLAGS = ["--global-batch-size", "48", "--epochs", "2", "--gradient-clipping", "0.5"]
NCCL = "gloo" if REHEARSAL else "nccl"


@pytest.fixture(scope="module")
def alone():
    """Return the weights of one process without a group."""
    model = Net()
    trainer(model, optimizer=sgd, **GLOBAL).fit(data())
    return weights(model)


def facts() -> list[dict]:
    """Return what the ranks wrote."""
    return [json.loads(path.read_text()) for path in sorted(Path().glob("facts-*.json"))]


def test_ddp_over_nccl_with_one_process(alone):
    code, output = run_job("ddp.py", "--backend", "pytorch-ddp", "--set", "dtype=float64", *FLAGS)
    assert code == 0, output
    (seen,) = facts()
    assert seen["transport"] == NCCL and seen["device"] == ("cpu" if REHEARSAL else "cuda:0")
    assert seen["reduced"] == {"value": 3.0} and seen["gathered"] == [{"rank": 0}] and seen["given_out"] == "word"
    assert distance(saved("weights.safetensors"), alone) < 1e-9
    assert "using the device under current context" not in output  # torch's warning about barrier()
    assert seen["is_quiet"] is (None if REHEARSAL else True)
    assert distance(saved("straight.safetensors"), saved("resumed.safetensors")) == 0.0


def test_two_processes_on_one_gpu_over_gloo(alone):
    flags = ["--backend", "pytorch-ddp", "--communication-backend", "gloo", "--set", "dtype=float64", *FLAGS]
    code, output = run_job("ddp.py", *flags, processes=2)
    assert code == 0, output
    seen = facts()
    assert [each["rank"] for each in seen] == [0, 1] and {each["transport"] for each in seen} == {"gloo"}
    assert {each["device"] for each in seen} == ({"cpu"} if REHEARSAL else {"cuda:0"})
    assert seen[1]["reduced"] == {"value": 6.0} and seen[1]["given_out"] == "word"
    assert distance(saved("weights.safetensors"), alone) < 1e-9
    assert distance(saved("straight.safetensors"), saved("resumed.safetensors")) == 0.0


def test_two_processes_on_one_gpu_are_refused_where_nobody_asked_for_it(gpu):
    gpu("a GPU to share")
    code, output = run_job("ddp.py", "--backend", "pytorch-ddp", processes=9)
    assert code == 3 and "9 GPUs per node requested" in output


def test_a_rank_out_of_memory_is_named_and_ends_the_run():
    flags = ["--backend", "pytorch-ddp", "--communication-backend", "gloo", "--batch-size", "16"]
    code, output = run_job("memory.py", *flags, processes=2)
    assert code == 1 and "rank 1 is out of memory in step 3:" in output, output
    assert "lower batch_size=16" in output and "activation_checkpointing=true" in output


def test_fsdp_with_parameters_in_host_memory():
    code, output = run_job("fsdp.py", "--backend", "fsdp", "--set", "fsdp.cpu_offload=true", timeout=150)
    assert code == 0, output
    (seen,) = facts()
    assert seen["transport"] == ("gloo" if REHEARSAL else "cpu:gloo,cuda:nccl")
    assert seen["devices"] == ["cpu"] and seen["buffers"] == ["cpu" if REHEARSAL else "cuda"]
    assert seen["are_pinned"] is (not REHEARSAL)
    model = Net(has_norm=True)
    trainer(model, **GLOBAL, loss_fn=_in_pairs).fit(data())
    assert distance(saved("weights.safetensors"), weights(model)) < 1e-9
    assert distance(saved("straight.safetensors"), saved("resumed.safetensors")) == 0.0
    assert (
        seen["fp16"]["is_finite"] and seen["fp16"]["left_out"][0] == 1 and seen["fp16"]["last"] < seen["fp16"]["first"]
    )
    assert seen["bf16"]["last"] < seen["bf16"]["first"]


def _in_pairs(outputs, targets):
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs, targets, reduction="sum"), float(len(targets))

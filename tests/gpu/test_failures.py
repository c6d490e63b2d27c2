"""Errors that only a GPU reports, and too little memory."""

from __future__ import annotations

import pytest
import torch
from gpu_support import Net, data, distance, run_job, saved, sgd, trainer, weights

WRONG = "loss = cross_entropy(outputs, batch[1])  # the line that fails"


@pytest.mark.parametrize("backend", ["single", "pytorch-ddp", "fsdp"])
def test_an_error_of_a_kernel_leads_to_its_line(gpu, backend):
    gpu("kernels, which report their errors later")
    code, output = run_job("wrong_label.py", "--backend", backend)
    assert code == 1 and "Assertion `t >= 0 && t < n_classes` failed" in output, output
    assert "CUDA error: device-side assert triggered: restarting (1 of 3) with CUDA_LAUNCH_BLOCKING=1" in output
    assert WRONG in output and "restarting (2 of 3)" not in output, output
    assert "During handling of the above exception" not in output  # no second error hides the first


@pytest.mark.parametrize("backend", ["single", "fsdp"])
def test_it_names_the_line_at_once_where_the_host_waits_for_each_kernel(gpu, monkeypatch, backend):
    gpu("kernels, which report their errors later")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    code, output = run_job("wrong_label.py", "--backend", backend)
    assert code == 1 and WRONG in output and "restarting" not in output, output


def test_micro_batches_are_halved_until_they_fit():
    flags = ["--backend", "pytorch-ddp", "--set", "auto_micro_batch=true", "--set", "dtype=float64"]
    code, output = run_job("halved.py", *flags, "--global-batch-size", "32", "--epochs", "2")
    assert code == 0 and output.count("restarting with micro-batches of at most") == 2, output
    model = Net()
    trainer(model, global_batch_size=32, epochs=2, dtype="float64", optimizer=sgd).fit(data())
    assert distance(saved("weights.safetensors"), weights(model)) < 1e-9


def test_the_largest_batch_is_found_and_fits(gpu, capsys):
    gpu("a limit of its memory")

    def step(model, batch):
        torch.cuda.memory.set_per_process_memory_fraction(0.1)
        total = torch.cuda.get_device_properties(0).total_memory
        pieces = [torch.empty(total // 160, dtype=torch.uint8, device="cuda") for _ in batch[0]]  # 16 take a tenth
        assert len(pieces) == len(batch[0])
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    found = trainer(Net(), training_step=step, epochs=1, verbose=True).find_batch_size(data(), start=4)
    assert found == 8
    assert "batch_size=16" in capsys.readouterr().out

"""Logging, metrics and callbacks read nothing from the device in a step without a log line."""

from __future__ import annotations

import itertools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.backends.single import SingleBackend
from distributed.backends.torch_base import NoOptions
from distributed.callbacks import Callback, SampleText, ThroughputAndMFU
from distributed.callbacks.of_fit import bound
from distributed.config.merging import Overrides, merge
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.loggers.logged import log, receiving
from distributed.state import DataRole, Job, TrainState
from distributed.training.common_step import CommonStep
from distributed.training.loop import Run, fit
from distributed.training.validation import _WINDOW, evaluate
from tests.unit.contexts import a_context


class CountReads(TorchDispatchMode):
    """Counts what makes the host wait for a device: `.item()`, `float(tensor)`, `bool(tensor)`, `.tolist()`."""

    reads = 0

    def __enter__(self):
        self._tolist = torch.Tensor.tolist

        def tolist(tensor):
            self.reads += 1
            return self._tolist(tensor)

        torch.Tensor.tolist = tolist
        return super().__enter__()

    def __exit__(self, *error):
        torch.Tensor.tolist = self._tolist
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        return func(*args, **(kwargs or {}))


class PerStep(Callback):
    def __init__(self, counter):
        self.counter, self.reads = counter, []

    def on_step_end(self, state, result):
        self.reads.append(self.counter.reads)


def texts(model, prompts):
    model(torch.zeros(1, 4))
    return prompts


class Logs(Callback):
    def on_step_end(self, state, result):
        _, loss, _, _ = result.averages[0]
        for reduce in ("mean", "sum", "max"):
            log(reduce, 2 * loss, reduce)


BATCH = BatchPlan(4, 1, 1, 4)


def prepared(metrics, **settings):
    merged = merge(Overrides(), {"epochs": 1, **settings})
    backend = SingleBackend(merged, NoOptions(), ProcessPlan(1, 1, "cpu", "single"))
    backend.setup()

    def sgd(params):
        return torch.optim.SGD(params, lr=0.1)  # AdamW reads its step counts itself

    backend.prepare(Job(torch.nn.Linear(4, 3), sgd, metrics=metrics), BATCH)
    return backend


def sharded(backend, batches, train):
    generator = torch.Generator().manual_seed(0)
    samples = batches * BATCH.batch_size
    data = torch.utils.data.TensorDataset(
        torch.randn(samples, 4, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )
    return backend.shard(data, BATCH, DataRole.TRAINING if train else DataRole.VALIDATION)


def reads_per_step(metrics, callbacks, log_every):
    backend = prepared(metrics, log_every_n_steps=log_every)
    with CountReads() as counter:
        per_step = PerStep(counter)
        run = Run(
            backend, backend.config, sharded(backend, 50, train=True), None, TrainState(), CommonStep(0, 1, None, "test"),
            [per_step, *callbacks], lambda: True,
        )  # fmt: skip
        context = a_context(
            model=backend.model,
            config=backend.config,
            log=backend.logged.log,
            log_rate=backend.logged.log_rate,
            observer=backend.observer,
        )
        with receiving(backend.logged), bound(run.callbacks, context):
            fit(run)
    counts = [0, *per_step.reads]
    return [after - before for before, after in itertools.pairwise(counts)]


def test_a_step_reads_only_what_the_nan_check_needs():
    bare = reads_per_step({}, [], log_every=20)
    full = reads_per_step({"mean": lambda outputs, targets: outputs.mean()}, [Callback(), Logs()], log_every=20)
    quiet = [step for step in range(1, 50) if step % 20]
    assert {bare[step] for step in quiet} == {full[step] for step in quiet}
    assert {full[step] for step in quiet} == {2}  # is the loss finite, are the gradients
    counted = reads_per_step(
        {}, [ThroughputAndMFU(peak_flops=1.0), SampleText(["a"], generate=texts, every_n_steps=7)], log_every=20
    )
    assert {counted[step] for step in quiet} == {2}  # after the first step, which counts
    assert full[20] > 2  # the log line, which follows the hook of its step, reads: the counter sees it


def test_evaluation_reads_once_for_many_batches():
    backend = prepared({"mean": lambda outputs, targets: outputs.mean()})

    def reads(batches):
        data = sharded(backend, batches, train=False)
        with CountReads() as counter:
            evaluate(backend, data)
        return counter.reads

    assert reads(2) == reads(50) == reads(_WINDOW) > 0  # at the end, with the check whether the metric is a mean
    assert reads(_WINDOW + 1) == reads(2) + 1

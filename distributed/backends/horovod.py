"""Train with Horovod: every process has a full copy of the model, and Horovod all-reduces gradients over Gloo, MPI or NCCL.

Horovod 0.28.1 is built for the installed torch by `make horovod`. Keras models run on torch, or on TensorFlow with
`horovod.keras_backend=tensorflow`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.backends._horovod.rules import NEEDS, REFUSES, REFUSES_CALLBACKS, HorovodOptions, check_job
from distributed.backends._horovod.timeline import Timeline, WithTimeline
from distributed.backends._torch.observer import TorchObserver
from distributed.backends._torch.wrapper import Wrapper
from distributed.backends.base import Refusals
from distributed.backends.effects import Need
from distributed.backends.torch_base import TorchBackend
from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.errors import ConfigError
from distributed.state import Job

if TYPE_CHECKING:
    import torch

    from distributed.backends._horovod.buckets import Buckets
    from distributed.backends._torch.world import TorchWorld
    from distributed.loggers.profiling import Profiler


_WAIT = "horovod: wait for gradients"  # label for waiting times in a profile


class HorovodBackend(TorchBackend[HorovodOptions]):
    """Run the torch step with gradients that Horovod exchanges."""

    Options: ClassVar[type[Any]] = HorovodOptions
    observer: HorovodObserver
    wrapper: HorovodWrapper
    other_keras: ClassVar[str] = "horovod.keras_backend=tensorflow"
    needs: ClassVar[Mapping[str, tuple[Need, ...]]] = NEEDS
    refuses: ClassVar[Refusals] = REFUSES
    refuses_callbacks: ClassVar[Refusals] = REFUSES_CALLBACKS

    def __init__(self, merged: MergedConfig, options: HorovodOptions, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        if options.adasum:
            _check_adasum(plan)
        self.observer = HorovodObserver(self)
        self.wrapper = HorovodWrapper(self)

    def _join(self) -> TorchWorld:
        from distributed.backends._horovod.world import join

        return join(self.plan, self.config, self._warn)

    def check(self, job: Job, *, here: bool) -> None:
        check_job(job)
        super().check(job, here=here)

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        notices = super().prepare(job, batch)
        self._share_optimizer()
        return notices

    def _share_optimizer(self) -> None:
        """Copy the state of rank 0's optimizer to all ranks, if the optimizer of any rank has been used before. A collective."""
        if self.world.reduce({"used": float(bool(self.optimizer.state))})["used"]:
            self.optimizer.load_state_dict(self.world.broadcast(self.optimizer.state_dict(), 0))


class HorovodWrapper(Wrapper):
    """Leave the model unwrapped. Hooks on its parameters pass the gradients to Horovod in buckets."""

    _backend: HorovodBackend

    def __init__(self, backend: HorovodBackend) -> None:
        super().__init__(backend)
        self._options = backend.options
        self._buckets: Buckets | None = None
        self._timeline: Timeline | None = None

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        from distributed.backends._horovod.buckets import Buckets
        from distributed.backends._horovod.world import HorovodWorld, load
        from distributed.backends._torch.modules import sparse_names

        self.release()
        hvd, world = load(), self._backend.world
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not isinstance(world, HorovodWorld) or world.world_size == 1 or not trained:
            return model
        if self._options.adasum and not hvd.mpi_enabled():
            raise ConfigError(
                "horovod.adasum=true needs a Horovod with MPI: install MPI's headers and run 'make horovod'"
            )
        world.copy_all_from([*model.parameters(), *model.buffers()], 0)
        sparse = sparse_names(model)
        if sparse and self._options.adasum:
            raise ConfigError(f"horovod.adasum takes no sparse gradients, but {min(sparse)} has them: set sparse=False")
        self._buckets = Buckets(
            hvd, trained, sparse=sparse & trained.keys(), is_compressed=self._options.compression == "fp16",
            is_adasum=self._options.adasum,
        )  # fmt: skip
        self._timeline = Timeline(hvd, self._options.timeline)
        self._timeline.start(self._backend.run_dir)
        return model

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        if self._buckets is None:
            yield
            return
        self._buckets.is_local = True
        try:
            yield
        finally:
            self._buckets.is_local = False

    def exchange(self) -> None:
        if self._buckets is not None:
            began = time.perf_counter()
            with self._labelled():
                self._buckets.finish()
            self._backend.observer.waits.add(time.perf_counter() - began)

    def _labelled(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that a profile shows as communication, because the profiler does not record Horovod's
        own threads."""
        if not self._backend.config.profile:
            return contextlib.nullcontext()
        label: contextlib.AbstractContextManager[Any] = self._backend.torch.profiler.record_function(_WAIT)
        return label

    def release(self) -> None:
        if self._buckets is not None:
            self._buckets.release()
            self._buckets = None
        if self._timeline is not None:
            self._timeline.stop()


class HorovodObserver(TorchObserver):
    """Observe Horovod, whose own threads torch's profiler does not see."""

    _backend: HorovodBackend

    def profiler(self, directory: Path, warmup: int, active: int) -> Profiler | None:
        from distributed.backends._horovod.world import load

        made, own = super().profiler(directory, warmup, active), self._backend
        if made is None or self.world_size == 1 or own.options.timeline is not None:
            return made
        return WithTimeline(made, load(), own.run_dir, own.on_event)


def _check_adasum(plan: ProcessPlan) -> None:
    if plan.world_size & (plan.world_size - 1):
        raise ConfigError(
            f"horovod.adasum=true combines ranks in pairs, but world_size={plan.world_size} is not a power of 2: use"
            f" {1 << plan.world_size.bit_length() - 1} processes, or drop it"
        )
    if plan.world_size > 1 and "OMPI_COMM_WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "horovod.adasum=true needs MPI, but these processes use Gloo: start them with mpirun -np"
            f" {plan.world_size} python -m distributed.cli train ..., or drop it"
        )

"""Train Keras models on TensorFlow with Horovod's gradient exchange, by the step of the backend `tensorflow`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.backends._horovod.rules import NEEDS, REFUSES, REFUSES_CALLBACKS, check_job
from distributed.backends._horovod.timeline import Timeline, WithTimeline
from distributed.backends._tensorflow import start
from distributed.backends._tensorflow.observer import TensorFlowObserver
from distributed.backends.base import Refusals
from distributed.backends.effects import Need
from distributed.backends.tensorflow import TensorFlowBackend
from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.config.registry import BackendEntry, backend_entry
from distributed.errors import ConfigError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.request import LaunchRequest
from distributed.state import Job, OnEvent, WorkerContext

if TYPE_CHECKING:
    from distributed.backends._horovod.world import HorovodWorld
    from distributed.backends._tensorflow.world import TensorFlowWorld
    from distributed.loggers.profiling import Profiler

CHOICE = "horovod.keras_backend"


class HorovodKerasBackend(TensorFlowBackend):
    """Run the TensorFlow step. Horovod sums over the ranks."""

    refuses: ClassVar[Refusals] = REFUSES
    refuses_callbacks: ClassVar[Refusals] = REFUSES_CALLBACKS
    needs: ClassVar[Mapping[str, tuple[Need, ...]]] = NEEDS
    _words: ClassVar[str] = f"{CHOICE}='tensorflow'"
    _flags: ClassVar[str] = f"--backend horovod --set {CHOICE}=tensorflow"

    _joined: HorovodWorld | None = None

    def __init__(self, merged: MergedConfig, options: Any, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        self.observer = HorovodKerasObserver(self)

    def _check_options(self) -> None:
        if self.options.adasum:
            raise ConfigError(
                f"horovod.adasum=true works with models on torch only: drop it, or set {CHOICE}='torch', which trains Keras models"
                " too"
            )

    def _check_environment(self) -> None:
        start.check_engine(self._words, self._flags)

    def check(self, job: Job, *, here: bool) -> None:
        check_job(job)
        super().check(job, here=here)

    def _join(self, found: WorkerEnvironment | None) -> TensorFlowWorld:
        start.import_quietly()
        if self.plan.device == "cuda":
            start.set_memory_growth(first_only=True)
        from distributed.backends._horovod.collectives import HorovodCollectives
        from distributed.backends._horovod.world import HorovodWorld, load
        from distributed.backends._tensorflow.world import TensorFlowWorld

        self.hvd = load()
        device = "cuda:0" if self.plan.device == "cuda" else "cpu"  # the only GPU that this process sees
        if self.plan.world_size == 1:
            return TensorFlowWorld(WorkerContext(0, 1, 0, 1, 0, device), None)
        plan = dataclasses.replace(self.plan, device="cpu")  # arrays are sent through host memory
        self._joined = HorovodWorld(plan, self.config, self._warn, found)
        context = dataclasses.replace(self._joined.context, device=device)
        return TensorFlowWorld(
            context,
            HorovodCollectives(self._joined, self.options.compression == "fp16"),
            self._joined.key_value_store(),
        )

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        notices = super().prepare(job, batch)
        self._timeline = Timeline(self.hvd, self.options.timeline)
        self.rewrap()
        return notices

    def rewrap(self) -> None:
        super().rewrap()
        if self.context.world_size > 1:
            self._timeline.start(self.run_dir)

    def unwrap(self) -> None:
        self._timeline.stop()
        super().unwrap()

    def teardown(self) -> None:
        super().teardown()
        if self._joined is not None:
            self._joined.leave()


class HorovodKerasObserver(TensorFlowObserver):
    """Observe the TensorFlow step with Horovod. TensorFlow's profiler does not see Horovod's threads."""

    _backend: HorovodKerasBackend

    def profiler(self, directory: Path, warmup: int, active: int) -> Profiler | None:
        made, own = super().profiler(directory, warmup, active), self._backend
        if made is None or self.world_size == 1 or own.options.timeline is not None:
            return made
        return WithTimeline(made, own.hvd, own.run_dir, own.on_event)


def entry_on_tensorflow(entry: BackendEntry) -> BackendEntry:
    """Return the registry entry of horovod for Keras on TensorFlow."""
    other = backend_entry("tensorflow")
    return dataclasses.replace(
        entry, requires=(*entry.requires, "tensorflow", "keras"), alone=other.name, environ=other.environ,
        before_script=f"{__name__}:before_script", warm_up=other.warm_up,
    )  # fmt: skip


def before_script(request: LaunchRequest, found: WorkerEnvironment, on_event: OnEvent) -> None:
    """Prepare a worker before its script runs: set the variables that TensorFlow reads at import, import it and seed it."""
    start.set_environment(found, request.device)
    start.import_seeded(request)

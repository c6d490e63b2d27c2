"""Observe training with torch: gradient norm, graph, weights and gradients, profile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.backends._torch.waits import MeasuredWaits
from distributed.callbacks import Counted
from distributed.errors import ConfigError
from distributed.loggers.observer import Observer

if TYPE_CHECKING:
    from distributed.backends._torch.collective_timer import CollectiveTimer
    from distributed.backends._torch.counting import Counter
    from distributed.backends.torch_base import TorchBackend
    from distributed.loggers.profiling import Profiler
    from distributed.state import MicroBatch


class TorchObserver(Observer):
    """Observe a torch engine."""

    def __init__(self, backend: TorchBackend[Any]) -> None:
        super().__init__(backend.plan.world_size)
        self._backend = backend
        self.waits = MeasuredWaits()
        self.timer: CollectiveTimer | None = None  # adds to `waits` what the engine's own collectives take
        self._kept: MicroBatch | None = None  # the batch for `graph`
        self._example: MicroBatch | None = None  # the batch for `write_program`
        self.counter: Counter | None = None  # runs the passes of an update, if a callback counts updates

    def add_wait_for_count(self, seconds: float) -> None:
        """Record how long this rank has waited for the number of labels of all ranks."""
        if self.timer is not None:
            self.timer.add(seconds)

    def measures_collectives(self) -> bool:
        """Return whether a `CollectiveTimer` can measure how long this rank waits for others."""
        return self.world_size > 1 and self._backend.device.type == "cpu"

    def waited_s(self) -> float | None:
        waited = self.waits.take()
        return super().waited_s() if waited is None else waited

    def newly_waited_s(self) -> float | None:
        return self.waits.take_new()

    def see(self, micro: MicroBatch) -> None:
        """Keep the first batch that a wrapper trains on, if the graph needs it."""
        self._kept = micro if self.keeps_batch else None
        if self.keeps_example:
            self._example = micro

    def gradient_norm(self) -> float | None:
        return self._backend.update.gradient_norm()

    def graph(self) -> bytes:
        from distributed.backends._torch.watching import graph_of

        own = self._backend
        kept, self._kept = self._kept, None
        if own.own_steps is not None:
            raise ConfigError("the script's own loop calls it, so its inputs are not known")
        if not own.kind.is_one_model:
            raise ConfigError("there are several models")
        if self.cuts_weights:
            raise ConfigError("its parameters are sharded across the processes")
        if kept is None:
            raise ConfigError("no batch was kept")
        with own.generators.untouched(), own.precision.autocast(), own.logged.ignoring():
            return graph_of(own.plain, own.passes.objective, own.passes.move(kept.batch), kept.num_samples)

    def named_parameters(self) -> list[tuple[str, Any]]:
        return self._backend.kind.named_parameters()

    def write_program(self, path: Path) -> str:
        from distributed.backends._torch import programs, served
        from distributed.backends._torch.sharding import is_sharded
        from distributed.backends.exporting import export, inputs_of

        own = self._backend
        if self._example is None:
            raise ConfigError("this fit has made no update")
        if any(map(is_sharded, own.plain.parameters())):
            raise ConfigError("its parameters are sharded across the processes")
        inputs = inputs_of(own.model, self._example.batch)
        try:
            export(own.model, None, path, format="torch-export", example=inputs, force=True)
            served.check_program(path)
        except programs.REFUSALS as error:  # of a model that cannot be called on its inputs alone
            raise ConfigError(next(iter(str(error).splitlines()), type(error).__name__)) from None
        return served.__name__

    def local_values(self) -> Iterator[tuple[str, Any]]:
        from distributed.backends._torch.watching import values_of

        return values_of(self._backend.plain)

    def profiler(self, directory: Path, warmup: int, active: int) -> Profiler | None:
        from distributed.backends._torch.profiler import TorchProfiler

        return TorchProfiler(directory, self._backend.context.rank, self._backend.device, warmup, active)

    def sampling(self, seed: int) -> contextlib.AbstractContextManager[Callable[[Any], Any]]:
        from distributed.backends._torch.sampling import sampling

        return sampling(self._backend, seed)

    def count_updates(self, *, counts_flops: bool) -> None:
        from distributed.backends._torch.counting import Counter

        self.counter = Counter(self._backend, counts_flops=counts_flops)

    @property
    def counted(self) -> Counted:
        return super().counted if self.counter is None else self.counter.counted

    @property
    def computes_in(self) -> str:
        own = self._backend
        kinds = {"bf16": "bfloat16", "fp16": "float16"}
        if own.mixed_precision in kinds:
            return kinds[own.mixed_precision]
        largest = max(own.plain.parameters(), key=lambda parameter: parameter.numel())
        return str(largest.dtype).removeprefix("torch.")

    @property
    def device_name(self) -> str:
        own = self._backend
        return own.torch.cuda.get_device_name(own.device) if own.device.type == "cuda" else ""

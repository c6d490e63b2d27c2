"""Evaluate, predict and save for one Trainer inside one process. `session.py` adds the fits."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed.backends.base import Backend
from distributed.backends.exporting import save_pretrained
from distributed.checkpoints.agreement import Agreement
from distributed.checkpoints.store import CheckpointStore
from distributed.config.merging import for_evaluation
from distributed.config.optimization import named, without_curve
from distributed.config.plan import BatchPlan
from distributed.config.registry import hint_of
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.launching.exposure import launcher_warnings
from distributed.launching.reporter import Reporter
from distributed.loggers.logged import receiving
from distributed.runs.processes import raise_kept
from distributed.state import DataRole, TrainState, WorkerContext
from distributed.training.files import TrainerFiles
from distributed.training.predictions import write_outputs
from distributed.training.setup import Setup
from distributed.training.validation import evaluate, evaluation_batch


@contextlib.contextmanager
def hinted() -> Iterator[None]:
    """Add the registry's hint for an engine's error, if it has one, to the notes of the error."""
    try:
        yield
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        hint = hint_of(str(error))
        if hint is not None and f"hint: {hint}" not in getattr(error, "__notes__", ()):
            error.add_note(f"hint: {hint}")
        raise


class ModelSession:
    """Evaluate, predict and save for one Trainer in this process with `backend`. All ranks call every method."""

    def __init__(self, setup: Setup, backend: Backend[Any]) -> None:
        self.setup, self.backend = setup, backend
        self.merged = setup.merged  # the settings of the newest fit, each with its source
        is_shown = setup.is_main_process and setup.request.is_shown
        self._reporter = Reporter(is_shown, setup.merged.config.verbose)
        self.backend.configure(on_event=self._reporter, job=setup.job)
        raise_kept()  # the script's imports may have swallowed a Ctrl-C, after which the other ranks may have left
        for text in launcher_warnings(setup.worker) if setup.is_main_process else ():
            self._reporter({"kind": "warning", "text": text})
        self.context: WorkerContext = self.backend.setup()
        atexit.register(_teardown, weakref.ref(self.backend))
        self.files = TrainerFiles(setup, self.backend, self.context, self._reporter)
        self._prepared_for: str | None = None  # "evaluation" or "fit"
        self._state: TrainState | None = None  # of the last fit that ended

    @hinted()
    def evaluate(self, data: Any) -> dict[str, float]:
        backend = self.backend
        with (
            backend.logged.evaluating(self.context.rank, self._names_of_metrics()),
            backend.own_generators(),
            backend.as_trained(),
            receiving(backend.logged),
            contextlib.closing(self._sharded(data, DataRole.EVALUATION)) as sharded,
        ):
            return evaluate(self.backend, sharded, self._enter_batch) or {}

    @hinted()
    def predict(self, data: Any, out: str | os.PathLike[str] | None = None, *, force: bool = False) -> Any:
        outputs = self._outputs_of(data)
        if out is not None:
            config = self.merged.config
            is_by_rank = bool(config.options("data").presharded)
            return write_outputs(
                out, outputs, self.backend, timeout_s=config.timeout_s, is_by_rank=is_by_rank, force=force
            )
        mine = [(number, self.context.rank, value) for number, (_, value, count) in enumerate(outputs) if count]
        return self.backend.join_outputs(self.backend.world.gather(mine))

    def _outputs_of(self, data: Any) -> Iterator[tuple[int, Any, int]]:
        """Yield (position, outputs of this rank, number of its samples) of each update batch. Each is a collective."""
        backend = self.backend
        with (
            backend.own_generators(),
            backend.as_trained(),
            contextlib.closing(self._sharded(data, DataRole.PREDICTION)) as sharded,
        ):
            for update_batch in sharded.epoch(0):
                (micro,) = update_batch.micro_batches
                self._enter_batch()
                yield update_batch.position, backend.predict_step(micro), micro.num_samples

    def _names_of_metrics(self) -> list[str]:
        """Return the names of metrics that are known before the first step."""
        job = self.setup.job
        return [*job.metrics, *(["accuracy"] if job.training_step is None else [])]

    def metric_average(self, value: float, name: str) -> float:
        return self.backend.world.reduce({name: value})[name] / self.context.world_size

    def main_process_first(self, local: bool) -> contextlib.AbstractContextManager[None]:
        context = self.context
        is_first = context.local_rank == 0 if local else context.is_main_process
        return Agreement(self.backend.world, self.merged.config.timeout_s).first(is_first, "main_process_first")

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[Any]:
        self._ensure_prepared(BatchPlan(1, 1, 1, 1))
        with self.backend.whole_model() as model:
            yield model

    def first_batch(self, data: Any) -> Any:
        """Return the first batch of `data`, with its targets, and prepare the model for it."""
        with self.backend.own_generators(), contextlib.closing(self._sharded(data, DataRole.EVALUATION)) as sharded:
            return next(sharded.epoch(0)).micro_batches[0].batch

    def save_pretrained(self, path: Path) -> None:
        with self.whole_model() as model:
            self.files.on_main(lambda: save_pretrained(model, self.setup.job.processing_class, path))

    def save(self, path: Path) -> Path:
        with self.backend.as_trained():
            return self._save(path)

    def _save(self, path: Path) -> Path:
        self._ensure_prepared(BatchPlan(1, 1, 1, 1))
        if path.suffix == ".safetensors":
            self.backend.export(path)
            return path
        store = CheckpointStore(
            path, self.backend, keep_latest_k=1 << 30, keep_best=False, monitor="", monitor_mode="min",
            context=self.context, on_event=self._reporter,
        )  # fmt: skip
        state = self._state_to_save()
        with contextlib.closing(store), self.backend.own_generators():  # a checkpoint stores their states too
            saved = store.save(state, without_paths(self.merged.config), None)
        if saved is None:
            raise ConfigError(f"{path} could not be written: name another path")
        return saved

    def _sharded(self, data: Any, role: DataRole) -> Any:
        batch = evaluation_batch(self.backend, data, self.merged.config.batch_size)
        sharded = self.backend.shard(data, batch, role)
        if (state := self._newest_state()) is not None:
            sharded.use_version(state.data_version)
        self._ensure_prepared(batch)  # after `shard`, because a model may need a batch to be built
        return sharded

    def _ensure_prepared(self, batch: BatchPlan) -> None:
        """Prepare the model for evaluation only, unless it is prepared already. A collective."""
        if self._prepared_for is not None:
            return
        self._prepared_for = "evaluation"
        backend, merged = self.backend, self.backend.merged
        backend.configure(for_evaluation(merged))
        with backend.own_generators():
            job, _ = named(merged, self.setup.job, 1)
            # Without a named schedule, because the data of a fit decides its length.
            backend.prepare(without_curve(job), batch)
        backend.unwrap()
        backend.configure(merged)

    def _newest_state(self) -> TrainState | None:
        """Return the state of the fit that runs or, if none does, of the last one that ended."""
        return self._state

    def _state_to_save(self) -> TrainState:
        """Return the state for a checkpoint that is saved now."""
        return self._state or TrainState()

    def _enter_batch(self) -> bool:
        """Note that a batch of an evaluation or a prediction begins. Return True."""
        return True


def _teardown(backend: weakref.ref[Backend[Any]]) -> None:
    """Tear down the backend at exit, unless it was garbage-collected."""
    if (alive := backend()) is not None:
        alive.teardown()


def without_paths(config: DistributedConfig) -> dict[str, Any]:
    """Return the settings for a manifest. Paths are left out, because a run directory can be copied."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("checkpoint_dir", "tensorboard_dir", "resume_from_checkpoint", "init_from")
    }

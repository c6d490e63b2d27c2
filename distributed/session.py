"""What a Trainer does inside one process: join, shard, prepare, resume, run the loop, save, leave in order."""

from __future__ import annotations

import atexit
import dataclasses
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import loop
from distributed.backends.base import Backend
from distributed.callbacks import Callback, EarlyStopping, load_states, states
from distributed.checkpoint import CheckpointStore
from distributed.common_step import CommonStep
from distributed.config import DistributedConfig
from distributed.errors import ConfigError, TrainingInterrupted
from distributed.interrupts import save_by_the_clock, stop_on_signals
from distributed.launcher import link
from distributed.launching.tee import tee_output
from distributed.plan import BatchPlan, plan_batch
from distributed.reporter import Reporter
from distributed.run_dir import RunDirectory, choose_run_dir
from distributed.settings import MergedConfig, config_yaml, for_evaluation
from distributed.state import History, TrainState, WorkerContext
from distributed.storage.agreement import Agreement
from distributed.storage.manifest import list_checkpoints
from distributed.summary import finished_lines, started_lines, was_interrupted, write_result

if TYPE_CHECKING:
    from distributed.trainer import Trainer


class _Process:
    """What all trainers of this process share: the run directory, and how many of them have used it."""

    run: RunDirectory | None = None
    num_trainers = 0
    num_fits = 0


class Session:
    """One trainer in this process. Every method is called by all ranks."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.backend = trainer, trainer.backend
        self.context: WorkerContext = self.backend.setup()
        atexit.register(_teardown, weakref.ref(self.backend))
        self._reporter = Reporter(self.context, trainer.merged.config.verbose)
        self.backend.report = self._reporter
        self._prepared_for: str | None = None  # "evaluation" or "fit"
        self._checkpoint: Path | None = None  # the newest one that this trainer saved or took up
        self._state: TrainState | None = None
        self._run: RunDirectory | None = None
        self._store: CheckpointStore | None = None
        self._num_fits = 0

    # ------------------------------------------------------------------ fit

    def fit(self, merged: MergedConfig, train_data: Any, val_data: Any) -> History:
        backend, config = self.backend, merged.config
        backend.merged, backend.config = merged, config
        self.trainer.merged = merged
        self._reporter.verbose = config.verbose
        batch = plan_batch(merged, self.context.world_size, self.backend.batch_size_of(train_data))
        check_monitor(merged, val_data)
        run = self._open_run(merged)
        train = backend.shard(train_data, batch, train=True)
        val = None if val_data is None else backend.shard(val_data, self._eval_batch(val_data, batch), train=False)
        try:
            notices = self._prepare(batch)
            callbacks = self._callbacks(merged, run, train)
            store = self._make_store(merged, run)
            state, resumed = self._resume(merged, store, callbacks)
            self._limit(merged, state, resumed)
            self._say_start(merged, batch, notices, state, resumed)
            return self._train(train, val, state, callbacks, store, run)
        finally:
            for data in (train, val):
                if data is not None:
                    data.close()

    def _train(
        self,
        train: Any,
        val: Any,
        state: TrainState,
        callbacks: list[Callback],
        store: CheckpointStore,
        run: RunDirectory,
    ) -> History:
        config = self.trainer.merged.config
        common = CommonStep(
            self.context.rank,
            self.context.world_size,
            self.backend.key_value_store(),
            f"fit-{_Process.num_fits}",
            timeout_s=config.timeout_s,
        )
        _Process.num_fits += 1
        started = time.monotonic()
        before = state.total_time
        the_run = loop.Run(
            self.backend,
            config,
            train,
            val,
            state,
            common,
            callbacks,
            lambda: False,
            last_saved=(state.step, state.epoch) if self._is_saved else (-1, -1),
        )

        saved = threading.Event()

        def write_checkpoint() -> bool:
            state.total_time = before + time.monotonic() - started
            is_written = self._write_checkpoint(state, callbacks, store)
            saved.set()
            return is_written

        the_run.write_checkpoint = write_checkpoint
        try:
            with (
                stop_on_signals(common, in_worker=self.trainer._worker is not None),
                save_by_the_clock(common, config.checkpoint_every_s, self.context, saved),
            ):
                loop.fit(the_run)
        except BaseException as error:
            for callback in callbacks:
                callback.on_error(state, error)
            raise
        finally:
            common.close()
            self.backend.unwrap()
        state.total_time = before + time.monotonic() - started
        self._state = state
        history = History(
            list(state.rows), dict(state.best), state.total_time, state.step, str(run.path), state.stop_reason
        )
        self._say_end(state, run)
        if was_interrupted(state):
            self._leave_after_signal(int(str(state.stop_reason).split()[1]), run, state)
        return history

    def _leave_after_signal(self, signum: int, run: RunDirectory, state: TrainState) -> None:
        if self.context.is_main_process:
            run.event("preempted", signal=signum, step=state.step)
        if signum == signal.SIGINT and self.trainer._worker is None:
            raise KeyboardInterrupt
        raise TrainingInterrupted(signum if signum == signal.SIGINT else signal.SIGTERM)

    # ------------------------------------------------------------------ parts of fit

    def _prepare(self, batch: BatchPlan) -> list[str]:
        if self._prepared_for == "fit":
            self.backend.rewrap()
            return []
        job = self.trainer.job
        if self._prepared_for == "evaluation":  # the same model, with all that training adds to it
            job = dataclasses.replace(job, model=self.backend.model)
        self._prepared_for = "fit"
        return self.backend.prepare(job, batch)

    def _eval_batch(self, data: Any, batch: BatchPlan) -> BatchPlan:
        size = self.backend.batch_size_of(data) or batch.batch_size
        return BatchPlan(size, 1, self.context.world_size, size * self.context.world_size)

    def _open_run(self, merged: MergedConfig) -> RunDirectory:
        """This trainer's run directory: the launcher's, or a new one; later trainers of the process use fit-2, fit-3, ..."""
        if self._run is not None:
            return self._run
        given = self.trainer._given
        first = _Process.run is None
        if _Process.run is None:
            path = given.run_dir if given is not None and given.run_dir is not None else None
            if path is None:
                path = self.backend.broadcast(
                    str(choose_run_dir(script_name())) if self.context.is_main_process else None
                )
            _Process.run = RunDirectory(path)
            if self.context.is_main_process and link() is None:
                _Process.run.check(resume=self._wants_resume(merged))
                _Process.run.lock()
        _Process.num_trainers += 1
        self._run = _Process.run if first else RunDirectory(_Process.run.path / f"fit-{_Process.num_trainers}")
        if self.context.is_main_process:
            self._run.path.mkdir(parents=True, exist_ok=True)
            typed = given.typed if given is not None else None
            text = config_yaml(merged, typed.script if typed else None, typed.script_args if typed else ())
            (self._run.path / "config.yaml").write_text(text, encoding="utf-8")
        self.backend.barrier()
        if first and link() is None and self.trainer._worker is not None:
            tee_output(self._run, self.context.rank)
        return self._run

    def _wants_resume(self, merged: MergedConfig) -> bool:
        given = self.trainer._given
        return (
            (given is not None and given.resume)
            or merged.config.resume_from_checkpoint is not False
            or self.context.restart_count > 0
        )

    def _make_store(self, merged: MergedConfig, run: RunDirectory) -> CheckpointStore:
        config = merged.config
        directory = run.checkpoints
        if config.checkpoint_dir is not None:
            directory = Path(config.checkpoint_dir)
            if _Process.run is not None and run is not _Process.run:
                directory = directory / run.path.name
        is_first = self._store is None
        self._store = CheckpointStore(
            directory, self.backend, keep_latest_k=config.keep_latest_k, keep_best=config.keep_best, monitor=config.monitor,
            monitor_mode=config.monitor_mode, context=self.context, report=self._reporter,
        )  # fmt: skip
        if config.checkpoint_dir is not None and is_first:  # held from then on, also after a fit that failed
            Agreement(self.backend, self.context).on_main(lambda: self._claim(directory, merged))
        return self._store

    def _claim(self, directory: Path, merged: MergedConfig) -> None:
        """Hold a checkpoint directory of the user's for this run alone. Main process."""
        shared = RunDirectory(directory, "checkpoint_dir", "--checkpoint-dir")
        shared.check(resume=True)
        shared.lock()
        if not self._wants_resume(merged) and list_checkpoints(directory):
            raise ConfigError(
                f"checkpoint_dir={str(directory)!r} holds checkpoints of an earlier run: set resume_from_checkpoint=true"
                " (or --resume) to go on from them, or name another directory"
            )

    def _resume(
        self, merged: MergedConfig, store: CheckpointStore, callbacks: list[Callback]
    ) -> tuple[TrainState, str | None]:
        """The state to go on from, and where it came from."""
        self._is_saved = False
        self._num_fits += 1
        if self._state is not None:  # a further fit of this trainer
            self._state.stop_reason = None
            return self._state, None
        path: Path | None = None
        source = merged.config.resume_from_checkpoint
        if self._wants_resume(merged):
            path = store.find()
        if path is None and isinstance(source, str):
            path = store.open(source)
        if path is None:
            return TrainState(), None
        state = store.load(path)
        self._is_saved = path.parent == store.directory
        self._checkpoint = path if self._is_saved else None
        if state.stop_reason != "early_stopping" or self.context.restart_count == 0:
            state.stop_reason = None
        load_states(callbacks, state.callbacks)
        if self.context.is_main_process:
            assert self._run is not None
            self._run.event("resumed", step=state.step, checkpoint=path.name)
        return state, path.name

    def _limit(self, merged: MergedConfig, state: TrainState, resumed: str | None) -> None:
        """Count `epochs` and `max_steps` of a further fit from where it started, also when a restart repeats it."""
        index = self._num_fits - 1
        while index >= len(state.fit_starts):  # a fit that failed at once left none
            state.fit_starts.append([state.epoch, state.step] if state.fit_starts else [0, 0])
        epoch, step = state.fit_starts[index]
        if index:
            config = merged.config
            limit = None if config.max_steps is None else config.max_steps + step
            changed = dataclasses.replace(config, epochs=config.epochs + int(epoch), max_steps=limit)
            self.trainer.merged = dataclasses.replace(merged, config=changed)

    def _callbacks(self, merged: MergedConfig, run: RunDirectory, train: Any) -> list[Callback]:
        config = merged.config
        callbacks = list(self.trainer.callbacks)
        if config.early_stopping_patience is not None:
            callbacks.append(EarlyStopping(config.monitor, config.early_stopping_patience, config.monitor_mode))
        if self.context.is_main_process:
            from distributed.loggers.files import MetricsFile
            from distributed.loggers.progress import ProgressLogger

            callbacks.append(MetricsFile(run.metrics))
            callbacks.append(ProgressLogger(self._reporter, config, train.updates_per_epoch))
        return callbacks

    def _write_checkpoint(self, state: TrainState, callbacks: list[Callback], store: CheckpointStore) -> bool:
        state.callbacks = states(callbacks)
        config = self.trainer.merged.config
        is_measured = bool(state.rows) and state.samples_in_epoch == 0 and state.rows[-1]["step"] == state.step
        path = store.save(state, _without_paths(config), state.rows[-1].get(config.monitor) if is_measured else None)
        if path is None:
            return False
        self._checkpoint = path
        if self.context.is_main_process:
            assert self._run is not None
            self._run.event("checkpoint_saved", step=state.step, checkpoint=path.name)
        for callback in callbacks:
            callback.on_checkpoint(state, path)
        return True

    def _say_start(
        self, merged: MergedConfig, batch: BatchPlan, notices: list[str], state: TrainState, resumed: str | None
    ) -> None:
        if not self.context.is_main_process:
            return
        if resumed is not None:
            notices = [*notices, f"resumed from {resumed}: step {state.step}, epoch {state.epoch}"]
        elif self._wants_resume(merged):
            notices = [*notices, "nothing to resume from: starting at step 0"]
        lines = started_lines(self.trainer.plan, self.context, batch, [*merged.notices, *notices])
        self._reporter({"kind": "started", "lines": lines})
        assert self._run is not None
        self._run.event(
            "started", backend=self.trainer.plan.backend, world_size=self.context.world_size, step=state.step,
            restart_count=self.context.restart_count,
        )  # fmt: skip

    def _say_end(self, state: TrainState, run: RunDirectory) -> None:
        if not self.context.is_main_process:
            return
        write_result(run, state, self.trainer.plan, self.context, self._checkpoint)
        if not was_interrupted(state):
            run.event("finished", step=state.step, epoch=state.epoch)
        self._reporter({"kind": "finished", "lines": finished_lines(run, state)})

    # ------------------------------------------------------------------ evaluate, predict, save

    def evaluate(self, data: Any) -> dict[str, float]:
        sharded = self._sharded(data)
        measured = loop.evaluate(self.backend, sharded)
        sharded.close()
        return measured or {}

    def predict(self, data: Any) -> Any:
        sharded = self._sharded(data)
        mine: list[tuple[int, int, Any]] = []
        for number, group in enumerate(sharded.epoch(0)):
            (micro,) = group.micro_batches
            outputs = self.backend.predict_step(micro)
            if micro.num_samples:
                mine.append((number, self.context.rank, outputs))
        sharded.close()
        parts = self.backend.gather(mine)
        return self.backend.join_outputs(parts)

    def save(self, path: Path) -> Path:
        self._ensure_prepared(BatchPlan(1, 1, 1, 1))
        if path.suffix == ".safetensors":
            self.backend.export(path)
            return path
        store = CheckpointStore(
            path,
            self.backend,
            keep_latest_k=1 << 30,
            keep_best=False,
            monitor="",
            monitor_mode="min",
            context=self.context,
            report=self._reporter,
        )
        state = self._state or TrainState()
        saved = store.save(state, _without_paths(self.trainer.merged.config), None)
        if saved is None:
            raise ConfigError(f"{path} could not be written: name another path")
        return saved

    def _sharded(self, data: Any) -> Any:
        size, world = self.trainer.merged.config.batch_size, self.context.world_size
        batch = BatchPlan(size, 1, world, size * world)  # a loader's own size counts instead, see _eval_batch
        self._ensure_prepared(batch)
        return self.backend.shard(data, self._eval_batch(data, batch), train=False)

    def _ensure_prepared(self, batch: BatchPlan) -> None:
        """The model without what only training needs, where no fit has prepared it."""
        if self._prepared_for is not None:
            return
        self._prepared_for = "evaluation"
        backend, merged = self.backend, self.backend.merged
        backend.merged = for_evaluation(merged)
        backend.config = backend.merged.config
        backend.prepare(self.trainer.job, batch)
        backend.unwrap()
        backend.merged, backend.config = merged, merged.config


def _teardown(backend: weakref.ref[Backend[Any]]) -> None:
    """At exit; nothing for a backend that nobody holds any more."""
    if (alive := backend()) is not None:
        alive.teardown()


def check_monitor(merged: MergedConfig, val_data: Any) -> None:
    config = merged.config
    if loop.is_larger_better(config.monitor) and config.monitor_mode == "min" and not merged.is_typed("monitor_mode"):
        raise ConfigError(
            f"monitor={config.monitor!r} is best when large, and monitor_mode is 'min': set monitor_mode='max' (or 'min' explicitly)"
        )
    if config.early_stopping_patience is not None and config.monitor.startswith("val_") and val_data is None:
        raise ConfigError(
            f"early_stopping_patience={config.early_stopping_patience} watches {config.monitor!r}, and fit() got no validation data:"
            " pass val_data, or set monitor='loss'"
        )


def _without_paths(config: DistributedConfig) -> dict[str, Any]:
    """What a manifest keeps: a run directory can be copied, so no path."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("checkpoint_dir", "tensorboard_dir", "resume_from_checkpoint")
    }


def script_name() -> str:
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else ""
    return name if name.endswith(".py") and "ipykernel" not in name else "notebook"

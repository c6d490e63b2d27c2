"""Run a Trainer inside one process: join, shard, prepare, resume, run the loop, save and leave in order."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from distributed.backends.base import Backend, ShardedData, check_callbacks
from distributed.backends.effects import Situation, lines_of, without_effect
from distributed.backends.out_of_memory import is_out_of_memory, out_of_memory
from distributed.callbacks import AveragedWeights, Callback, EarlyStopping, FitContext
from distributed.callbacks.of_fit import before_update, bound, load_states, states
from distributed.checkpoints.agreement import Agreement
from distributed.checkpoints.mirror import UPLOAD_FAILED
from distributed.checkpoints.store import CheckpointStore
from distributed.config.merging import MergedConfig
from distributed.config.optimization import RateCurve, named
from distributed.config.plan import BatchPlan, in_effect, plan_batch
from distributed.config.registry import backend_entry
from distributed.errors import ConfigError, DistributedError, TrainingInterrupted
from distributed.launching.causes import says_that_another_rank_has_ended
from distributed.launching.epochs import Caller, Epochs
from distributed.launching.heartbeat import Phase, heartbeat
from distributed.launching.reporter import report_before_abort
from distributed.launching.request import launched_by, link
from distributed.loggers import registry as loggers
from distributed.loggers.base import LoggedFit, Tracker
from distributed.loggers.files import media_at
from distributed.loggers.logged import receiving
from distributed.metrics.monitor import check_monitor, check_own_loop
from distributed.runs.directory import RunDirectory
from distributed.runs.history import History
from distributed.runs.processes import REGROUP_SIGNAL
from distributed.runs.summary import (
    Result,
    finished_lines,
    is_stopped_by_callback,
    started_lines,
    was_interrupted,
)
from distributed.state import TrainState, WorkerContext
from distributed.training import ending, loop
from distributed.training.common_step import CommonStep
from distributed.training.interrupts import by_the_clock, stop_on_signals
from distributed.training.micro_batches import shard_to_fit
from distributed.training.model_session import ModelSession, hinted, without_paths
from distributed.training.setup import Setup
from distributed.training.snapshots import Snapshots, open_snapshots
from distributed.training.so_far import means_of_epoch
from distributed.training.validation import Validation, check_targets, sets_of, shard_of

_fit_numbers = itertools.count()  # numbers the fits of this process, because each needs new keys in the ranks' store


@dataclasses.dataclass(frozen=True)
class OpenedFit:
    """Hold what a fit has opened before it loads a checkpoint."""

    train: ShardedData
    shards: Mapping[str, ShardedData]  # validation sets by the prefix of their metrics
    callbacks: list[Callback]
    store: CheckpointStore
    snapshots: Snapshots | None
    run: RunDirectory
    found: Path | None  # the checkpoint or the snapshot from which the fit resumes
    notices: list[str]


@dataclasses.dataclass
class Fit:
    """Hold the parts of a fit that trains."""

    state: TrainState
    train: ShardedData
    validation: Validation | None
    callbacks: list[Callback]
    store: CheckpointStore
    run: RunDirectory
    result: Result
    began: float  # start of the fit in monotonic seconds, minus the `total_time` of earlier attempts
    saved: threading.Event = dataclasses.field(default_factory=threading.Event)
    pending: TrainState | None = None  # the state of a save that is not over
    take_snapshot: Callable[[], bool] | None = None  # a collective; None without `snapshot_every_n_steps`

    def stop_clock(self) -> None:
        """Update `state.total_time`."""
        self.state.total_time = time.monotonic() - self.began

    def state_to_save(self) -> TrainState:
        """Return the state with the time and the states of the callbacks as they are now."""
        self.stop_clock()
        self.state.callbacks = states(self.callbacks)
        return self.state


class FitSession(ModelSession):
    """Train, evaluate, predict and save for one Trainer in this process with `backend`. All ranks call every method."""

    def __init__(self, setup: Setup, backend: Backend[Any]) -> None:
        super().__init__(setup, backend)
        self._curve: Any = None  # the schedule of the fit, if settings name it
        self.checkpoint: Path | None = None  # newest checkpoint that this trainer saved or resumed from
        self._is_saved = False  # whether the state at the start of training is in the store
        self._fit: Fit | None = None  # the fit that runs
        self._num_fits = 0

    # ------------------------------------------------------------------ fit

    @hinted()
    def fit(self, settings: Mapping[str, Any], train_data: Any, val_data: Any) -> History:
        with self.backend.own_generators(), contextlib.ExitStack() as leaving:
            opened = self.open(settings, train_data, val_data, leaving)
            with self.running(self.start(opened)) as run:
                loop.fit(run)
            return History.of(run.state, str(opened.run.path), run.state.total_time)

    def open(
        self, settings: Mapping[str, Any], train_data: Any, val_data: Any, leaving: contextlib.ExitStack
    ) -> OpenedFit:
        """Divide the data among the ranks, open the run directory and prepare the model. A collective.

        `leaving` gets the contexts to close at the end of the fit.
        """
        leaving.enter_context(heartbeat().fit())
        merged = self.setup.merge_for_fit(settings)
        backend = self.backend
        self._configure(merged)
        loader_batch_size = backend.batch_size_of(train_data)
        full_size = self.setup.full_size or backend.data_parallel_size
        planned = plan_batch(merged, backend.data_parallel_size, loader_batch_size, full_size=full_size)
        sets = sets_of(val_data, self.setup.job.metrics)
        check_targets(self.setup.job, train_data, sets)
        if self.setup.job.is_own_loop:
            check_own_loop(merged)
        else:
            check_monitor(merged, list(sets), self.setup.job)
        check_callbacks(backend, self.setup.callbacks)
        loggers.check_callbacks(merged, self.setup.callbacks)
        leaving.callback(self._reporter.close)
        train, batch = shard_to_fit(backend, train_data, planned, self.files, leaving)
        # config.yaml has the batch sizes for all processes, even if some are missing: a run that starts from it begins with all.
        full = plan_batch(merged, full_size, loader_batch_size) if batch == planned else batch
        run = self.files.open_run(in_effect(merged, full, loader_batch_size))
        backend.configure(run_dir=run.path)
        shards = {
            prefix: leaving.enter_context(contextlib.closing(shard_of(backend, prefix, data, batch, merged.config)))
            for prefix, data in sets.items()
        }
        callbacks = self._callbacks(merged)
        store = self.files.open_store(merged, run)
        snapshots = open_snapshots(backend, run.path, self.context, self._reporter, self.files.on_main)
        is_restart = self._state is None and self.setup.restart_count > 0
        snapshot = snapshots.newest() if snapshots is not None and is_restart else None
        found = self._find(merged, store, run, in_full=snapshot is not None)
        if snapshot is not None and (found is None or snapshot.name > found.name):
            found = snapshot
        notices = [
            *(notice for data in (train, *shards.values()) for notice in data.notices),
            *self._prepare(batch, train.updates_per_epoch, is_resumed=found is not None),
        ]
        return OpenedFit(train, shards, callbacks, store, snapshots, run, found, notices)

    def start(self, opened: OpenedFit) -> Fit:
        """Load the checkpoint that was found, if there is one, and open the loggers. A collective."""
        train, callbacks, run = opened.train, opened.callbacks, opened.run
        state, resumed = self._resume(opened.found, opened.store, callbacks, run)
        if resumed is not None and opened.snapshots is not None and opened.found in opened.snapshots:
            resumed += " in memory"
        for data in (train, *opened.shards.values()):
            data.use_version(state.data_version)
        merged = self._limit(self.merged, state)
        callbacks += loggers.loggers_of(LoggedFit(
            run, merged, self.setup.plan, train.batch, self.context, self.backend, state, train.updates_per_epoch,
            self.setup.worker is not None, self.setup.loggers, self.setup.callbacks, self._reporter,
        ))  # fmt: skip
        validation = Validation(opened.shards) if opened.shards and not self.setup.job.is_own_loop else None
        result, began = Result(run, self.setup.plan, self.context), time.monotonic() - state.total_time
        fit = Fit(state, train, validation, callbacks, opened.store, run, result, began)
        if opened.snapshots is not None:
            fit.take_snapshot = lambda: opened.snapshots.take(fit.state_to_save(), without_paths(merged.config))
        if merged.config.checkpoint_async:
            opened.notices.append(self.files.memory_for_copies())
        self._show_start(merged, train.batch, opened.notices, fit, resumed)
        self._event(
            fit, "started", backend=self.setup.plan.backend, num_nodes=self.setup.plan.num_nodes, world_size=self.context.world_size,
            restart_count=self.setup.restart_count, batch_dependent=list(self.backend.batch_dependent),
        )  # fmt: skip
        return fit

    def _configure(self, merged: MergedConfig) -> None:
        self.merged = merged
        self.backend.configure(merged)
        self._reporter.set_verbose(merged.config.verbose)

    @contextlib.contextmanager
    def running(self, fit: Fit) -> Iterator[loop.Run]:
        """Prepare to run the loop in the block, and record how the loop ended. Entering and leaving the block are collectives."""
        config, state = self.merged.config, fit.state
        common = CommonStep(
            self.context.rank, self.context.world_size, self.backend.world.key_value_store(), f"fit-{next(_fit_numbers)}",
            timeout_s=config.timeout_s,
        )  # fmt: skip
        channel = link()
        if self.setup.is_elastic and channel is not None:
            channel.send({"kind": "trains"})  # on every rank, because each node has its own launcher
        _report_choice(self.setup.plan.backend, self.context)
        caller = Caller(self.setup.on_epoch, lambda: common.request(f"signal {signal.SIGTERM}"))
        self._reporter.on_event = Epochs(caller)
        last_saved = (state.step, state.epoch) if self._is_saved else (-1, -1)
        job = self.setup.job
        run = loop.Run(
            self.backend, config, fit.train, fit.validation, state, common, fit.callbacks, lambda: self._write_checkpoint(fit, common),
            lambda: fit.pending is None or self._after_save(fit, fit.store.finish()), fit.take_snapshot, last_saved,
            metrics=job.metrics, has_training_step=job.training_step is not None or job.is_own_loop,
            is_monitor_expected=not job.is_own_loop or self.merged.is_given("monitor"), is_checkpoint_lost=fit.store.is_lost,
        )  # fmt: skip
        self.backend.configure(before_update=before_update(fit.callbacks, state))
        earlier = self.files.on_main(lambda: media_at(fit.run.media, state.step))
        self.backend.logged.begin(self.context.rank, self._names_of_metrics(), takes_media=True, earlier=earlier)
        with contextlib.closing(fit.store):
            with (
                bound(fit.callbacks, self._context_of(fit, run)),
                receiving(self.backend.logged),
                self._recorded(fit, run, common),
            ):
                yield run
            fit.stop_clock()
            self._state = state
            self._show_end(fit)
            ending.deliver(self, fit, self._reporter)
            ending.offer_logs(self, fit)
        self._close_loggers(fit)
        if caller.error is not None:
            raise caller.error
        if was_interrupted(state):
            self._leave_after_signal(int(str(state.stop_reason).split()[1]))

    @contextlib.contextmanager
    def _recorded(self, fit: Fit, run: loop.Run, common: CommonStep) -> Iterator[None]:
        """Handle signals and clocks while the loop runs in the block. Record an error of the loop and raise it. A collective."""
        config, self._fit = run.config, fit
        try:
            with (
                stop_on_signals(
                    common,
                    self.setup.worker is not None,
                    is_elastic=self.setup.is_elastic,
                    may_leave=self.setup.may_leave,
                ),
                by_the_clock(common, loop.SAVE, config.checkpoint_every_s, self.context, fit.saved),
                by_the_clock(common, loop.VALIDATE, config.validate_every_s, self.context, run.validated),
            ):
                yield
                self.backend.reassemble()
                self._settle(fit)
        except BaseException as error:
            raised = self._error_to_raise(fit, error)
            report_before_abort(raised, self.context.rank)
            self._record_failure(fit, raised)
            if raised is error:
                raise
            raise raised from error
        finally:
            self._fit = None
            fit.store.give_up()
            common.close()
            self.backend.unwrap()

    def _settle(self, fit: Fit) -> None:
        """Wait for the uploads, and tell the launcher that the run waits for them. A collective."""
        channel = link() if fit.store.address is not None else None
        if channel is not None:
            channel.send({"kind": "uploads", "is_over": False})
        fit.store.settle()
        if channel is not None:
            channel.send({"kind": "uploads", "is_over": True})

    def _error_to_raise(self, fit: Fit, error: BaseException) -> BaseException:
        """Return the error to raise for `error`.

        If memory ran out, this is an error that names the rank and what to change, unless the request is for the original error.
        """
        is_of_user = not isinstance(error, Exception) or isinstance(error, DistributedError)
        if is_of_user or not self.setup.request.explains_out_of_memory or not is_out_of_memory(error):
            return error
        config, is_update = self.merged.config, heartbeat().progress.phase is Phase.TRAINING
        return out_of_memory(
            error, self.context.rank, fit.state.step + 1, fit.train.batch.batch_size, config,
            is_cut=self.backend.observer.cuts_weights and self.context.world_size > 1,
            may_halve=config.auto_micro_batch and is_update and link() is not None,
        )  # fmt: skip

    def _context_of(self, fit: Fit, run: loop.Run) -> FitContext:
        backend = self.backend
        return FitContext(
            backend.model, backend.users_optimizer, run.config, fit.run.path.absolute(), run.stop, log=backend.logged.log,
            save=lambda: run.common_step.request(loop.SAVE), evaluate=lambda data: self._evaluate_in(run, data),
            notice=lambda text: self._reporter({"kind": "notice", "text": text}), num_samples=run.train.num_samples,
            named_parameters=backend.observer.named_parameters,
            averaged_weights=cast(AveragedWeights, backend.averaged_weights),  # see `check_callbacks`: not None if it is used
            log_rate=backend.logged.log_rate, worker=self.context, observer=backend.observer,
            processing_class=self.setup.job.processing_class,
            updates_per_epoch=run.train.updates_per_epoch,
            means_of_epoch=lambda: means_of_epoch(run),
        )  # fmt: skip

    def _evaluate_in(self, run: loop.Run, data: Any) -> dict[str, float]:
        """Evaluate the model in a hook of `run`. A collective."""
        if run.is_validating:
            raise ConfigError("context.evaluate() was called within a validation: call it in another hook")
        return self.evaluate(data)

    def _newest_state(self) -> TrainState | None:
        return self._state if self._fit is None else self._fit.state

    def _state_to_save(self) -> TrainState:
        if self._fit is None:
            return super()._state_to_save()
        state = self._fit.state_to_save()
        heartbeat().mark(Phase.SAVING, state.step, is_slow=True)
        return state

    def _enter_batch(self) -> bool:
        """Mark in the heartbeat that a batch of an evaluation or a prediction inside a fit begins. Return True."""
        if self._fit is not None:
            heartbeat().mark(Phase.VALIDATION, self._fit.state.step, is_slow=True)
        return True

    def _record_failure(self, fit: Fit, error: BaseException) -> None:
        for callback in fit.callbacks:
            callback.on_error(fit.state, error)
        fit.stop_clock()
        if link() is None and UPLOAD_FAILED not in str(error) and (problem := fit.store.finish_uploads()):
            self._reporter({"kind": "warning", "text": problem})  # with our launcher, the launcher does this
        is_decided = link() is None or not says_that_another_rank_has_ended(error)
        fit.result.write_failed(fit.state, self.checkpoint, error, is_decided=is_decided)
        ending.write_report(fit, self.context, self._reporter)
        _close_all(fit.callbacks)

    def _close_loggers(self, fit: Fit) -> None:
        """Close the loggers. Ranks without loggers wait for the others without a time limit. A collective."""
        if any(isinstance(callback, Tracker) for callback in fit.callbacks):
            Agreement(self.backend.world, self.merged.config.timeout_s).on_all(lambda: _close_all(fit.callbacks))

    def _leave_after_signal(self, signum: int) -> None:
        if signum == signal.SIGINT and self.setup.worker is None:
            raise KeyboardInterrupt
        raise TrainingInterrupted(signum if signum in (signal.SIGINT, REGROUP_SIGNAL) else signal.SIGTERM)

    # ------------------------------------------------------------------ parts of fit

    def _prepare(self, batch: BatchPlan, updates_per_epoch: int | None, *, is_resumed: bool) -> list[str]:
        config = self.merged.config
        if self._prepared_for == "fit":
            self.backend.rewrap()
            is_fixed = (
                isinstance(self._curve, RateCurve) and self._curve.kind != "constant" and not self._curve.is_length_set
            )
            text = "the schedule keeps its length of the first fit: set scheduler_steps to the updates of all fits"
            return [text] if is_fixed else []
        limits = [config.max_steps, None if updates_per_epoch is None else updates_per_epoch * config.epochs]
        job, notices = named(
            self.merged, self.setup.job, min((each for each in limits if each is not None), default=None)
        )
        if self._prepared_for == "evaluation":  # prepare the same model again, with what only training needs
            job = dataclasses.replace(job, model=self.backend.model)
        is_filled = is_resumed and not config.checkpoint_trainable_only  # its weights are all in the checkpoint
        if is_filled or self._prepared_for == "evaluation":  # the evaluation has loaded the weights already
            job = dataclasses.replace(job, init_from=None)
        self._prepared_for, self._curve = "fit", job.scheduler
        return [*notices, *self.backend.prepare(job, batch)]

    def _find(self, merged: MergedConfig, store: CheckpointStore, run: RunDirectory, *, in_full: bool) -> Path | None:
        """Return the checkpoint from which this fit resumes, or None. With `in_full`, it is verified in full. A collective."""
        if self._state is not None:  # a further fit of this trainer
            return None
        path: Path | None = None
        source = merged.config.resume_from_checkpoint
        if self.files.wants_resume(merged):
            path = store.find(in_full=in_full)
            if path is None:
                self.files.refuse_to_start_over(run, store)
        if path is None and isinstance(source, str):
            path = store.open(source)
        return path

    def _resume(
        self, path: Path | None, store: CheckpointStore, callbacks: list[Callback], run: RunDirectory
    ) -> tuple[TrainState, str | None]:
        """Return the state to start from, and the name of its checkpoint `path` or None. A collective."""
        self._is_saved = False
        self._num_fits += 1
        if self._state is not None:
            self._state.stop_reason = None
            return self._state, None
        if path is None:
            return TrainState(), None
        path, state = store.resume(path)
        self._is_saved = path.parent == store.directory
        self.checkpoint = path if self._is_saved else None
        detail = {}
        if not self._stays_stopped(state, run, path):
            if is_stopped_by_callback(state):
                detail["after"] = state.stop_reason  # a restart of this launch reads it, see `RunDirectory.has_gone_on`
            state.stop_reason = None
        for name in load_states(callbacks, state.callbacks):
            text = f"{path.name} holds the state of a callback {name}, but this run has no such callback"
            self._reporter({"kind": "warning", "text": text})
        if self.context.is_main_process:
            run.event("resumed", step=state.step, checkpoint=path.name, **detail)
        return state, path.name

    def _stays_stopped(self, state: TrainState, run: RunDirectory, path: Path) -> bool:
        """Return whether a callback has stopped this very launch at the checkpoint `path`, so that a restart has nothing to do.

        A stop of an earlier launch, or of another run, does not count, because the user resumed that run to continue it. All
        ranks must call this.
        """
        if self.setup.restart_count == 0 or not is_stopped_by_callback(state) or not self._is_saved:
            return False
        return not self.files.on_main(lambda: run.has_gone_on(path.name))

    def _limit(self, merged: MergedConfig, state: TrainState) -> MergedConfig:
        """Return the settings with `epochs` and `max_steps` counted from the start of this fit, also when a restart repeats it."""
        index = self._num_fits - 1
        while index >= len(state.fit_starts):  # a fit that failed immediately has left no entry
            state.fit_starts.append([state.epoch, state.step] if state.fit_starts else [0, 0])
        epoch, step = state.fit_starts[index]
        if index:
            config = merged.config
            limit = None if config.max_steps is None else config.max_steps + step
            changed = dataclasses.replace(config, epochs=config.epochs + int(epoch), max_steps=limit)
            self.merged = merged = dataclasses.replace(merged, config=changed)
        return merged

    def _callbacks(self, merged: MergedConfig) -> list[Callback]:
        """Return the callbacks whose state is in checkpoints: those of the user, and early stopping."""
        config = merged.config
        patience = config.early_stopping_patience
        stopping = [] if patience is None else [EarlyStopping(config.monitor, patience, config.monitor_mode)]
        return [*self.setup.callbacks, *stopping]

    def _write_checkpoint(self, fit: Fit, common: CommonStep) -> bool:
        """Save a checkpoint and tell the callbacks, or begin to save it in the background. A collective.

        Return False if it could not be written to disk.
        """
        if not self.setup.request.keeps_checkpoints:
            return True
        state, config = fit.state, self.merged.config
        fit.state_to_save()
        is_measured = bool(state.rows) and state.rows[-1]["step"] == state.step
        best_value, settings = state.rows[-1].get(config.monitor) if is_measured else None, without_paths(config)
        if config.checkpoint_async:
            kept = dataclasses.replace(state, rows=list(state.rows), metrics=dict(state.metrics), best=dict(state.best))
            has_begun = fit.store.save_in_background(state, settings, best_value, lambda: common.request(loop.SAVED))
            fit.pending = kept if has_begun else None
            return has_begun
        fit.pending = state
        return self._after_save(fit, fit.store.save(state, settings, best_value))

    def _after_save(self, fit: Fit, path: Path | None) -> bool:
        """Tell the callbacks that a save is over. A collective in the hooks only.

        `path` is the checkpoint, or None if the save failed. Returns whether there is a checkpoint.
        """
        state, fit.pending = fit.pending, None
        fit.saved.set()
        if path is None or state is None:
            return False
        self.checkpoint = path
        self._event(fit, "checkpoint_saved", step=state.step, checkpoint=path.name)
        if self.context.is_main_process:
            if self.setup.is_elastic:
                self._reporter({"kind": "saved"})
            fit.result.write("running", fit.state, path)
        for callback in fit.callbacks:
            callback.on_checkpoint(state, path)
        return True

    def _show_start(
        self, merged: MergedConfig, batch: BatchPlan, notices: list[str], fit: Fit, resumed: str | None
    ) -> None:
        if not self.context.is_main_process:
            return
        state = fit.state
        if resumed is not None:
            notices = [*notices, f"resumed from {resumed}: step {state.step}, epoch {state.epoch_in_words}"]
            if self._num_fits < len(state.fit_starts):
                notices.append(
                    f"this is fit {self._num_fits} of the trainer, and the checkpoint is from fit {len(state.fit_starts)}: what the script"
                    " computes before that fit, it computes with the weights of the checkpoint"
                )
            elif state.epoch >= merged.config.epochs or state.step >= (merged.config.max_steps or math.inf):
                notices.append("nothing is left to do: raise epochs (or max_steps) to train further")
        elif self.files.wants_resume(merged) and self._num_fits == 1:
            notices = [
                *notices,
                f"nothing to resume from in {fit.store.address or fit.store.directory}: starting at step 0",
            ]
        else:
            notices = [*notices, *self.files.notices()]
        where = Situation(
            self.backend, launched_by(), self.setup.worker is not None, has_schedule=self.backend.has_schedule
        )
        notices = [*merged.notices, *lines_of(without_effect(where)), *notices]
        lines = started_lines(self.setup.plan, self.context, batch, notices)
        fit.result.write("running", state, self.checkpoint)
        self._reporter({"kind": "started", "lines": lines})

    def _event(self, fit: Fit, name: str, **detail: Any) -> None:
        """Write an event into the journal of the run, and into that of each node that has a directory of its own."""
        is_first_of_part = self.context.local_rank == 0 and bool(fit.run.part_of)
        if self.context.is_main_process or is_first_of_part:
            fit.run.event(name, **{"step": fit.state.step, **detail})

    def _show_end(self, fit: Fit) -> None:
        status, event, detail = ending.end_of(fit.state, self.context.world_size)
        fit.result.write(status, fit.state, self.checkpoint)
        self._event(fit, event, **detail)
        if not self.context.is_main_process or status == "running":
            return
        ending.write_report(fit, self.context, self._reporter)
        self._reporter(
            {"kind": "finished", "lines": [*finished_lines(fit.run, fit.state), *ending.lines_to_resume(self, fit)]}
        )


def _report_choice(backend: str, context: WorkerContext) -> None:
    """Make the launcher of this node import the backend for a restart, if the launcher did not know the script's choice."""
    channel, request, entry = link(), launched_by(), backend_entry(backend)
    is_known = request is None or request.warm_up == entry.warm_up
    if channel is not None and entry.warms_up_late and not is_known and context.local_rank == 0:
        channel.send({"kind": "chose backend", "backend": backend})


def _close_all(callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        if isinstance(callback, Tracker):
            callback.close()

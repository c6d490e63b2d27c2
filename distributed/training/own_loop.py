"""Session, with which a script runs its own training loop on any torch backend."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distributed.backends.keras_kinds import is_model
from distributed.config.optimization import check_named
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.launching.engines import seed_generators
from distributed.loggers.logger import Logger, split_loggers
from distributed.runs.processes import interrupts_kept
from distributed.state import Job
from distributed.training.model_session import hinted
from distributed.training.own_run import KeptState, OwnRun
from distributed.training.session import FitSession
from distributed.training.setup import Setup, make_setup

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Position:
    """Position at which a loop continues.

    Attributes:
        step: the number of updates so far.
        epoch: the number of epochs so far.
        samples_in_epoch: the number of samples of the current epoch that were used, over all ranks.
    """

    step: int
    epoch: int
    samples_in_epoch: int


class Session:
    """Run your own training loop with the steps, the data order and the checkpoints of `Trainer`.

    Use it as `with Session(...) as s:` in every process. Processes are started by `distributed train`, by another launcher, or
    by `distributed.launch`. The block begins with the random generators seeded by `seed`. When it ends, the last checkpoint is
    saved, and the model that was passed to `prepare` has the trained weights. Methods and properties raise ConfigError outside of
    the block. Those that use the model or the run directory raise it before `prepare` too.

    Args:
        config: as for `Trainer`.
        loggers: names of loggers and `Logger` objects, as for `Trainer`.
        settings: fields of DistributedConfig, or the options of a backend, as for `Trainer`.

    Raises:
        ConfigError: a setting is wrong, or this process is not one of the workers that the settings ask for.
        ResourceError: a library or a device is missing.
    """

    def __init__(
        self,
        config: DistributedConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        loggers: str | Sequence[str | Logger] = (),
        **settings: Any,
    ) -> None:
        objects, names = split_loggers(loggers)
        if names:
            settings = {**settings, "loggers": names}
        self._job, self._kept = Job(None, is_own_loop=True), KeptState()
        self._setup = make_setup(type(self).__name__, None, self._job, [self._kept], config, settings, objects)
        _refuse_elsewhere(self._setup)
        self._fits: FitSession | None = None
        self._run: OwnRun | None = None
        self._leaving = contextlib.ExitStack()

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as leaving:
            leaving.enter_context(interrupts_kept())
            leaving.enter_context(hinted())
            self._fits = FitSession(self._setup, self._setup.backend)
            leaving.enter_context(self._setup.backend.own_generators())
            seed_generators(self._setup.merged.config.seed)
            self._leaving = leaving.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._leaving.__exit__(kind, error, traceback)

    # ------------------------------------------------------------------ before the loop

    def prepare(self, model: Any, optimizer: Any = None, *loaders: Any, scheduler: Any = None) -> tuple[Any, ...]:
        """Divide the data among the ranks, and prepare the model, the optimizer and the schedule. Every rank calls it, once.

        Args:
            model: a module, or a factory of one, as for `Trainer`.
            optimizer: an optimizer, a factory `(params) -> optimizer`, or None for the one that the settings name.
            loaders: the training data, then any number of loaders for evaluation, each of a kind that `Trainer.fit` takes. The
                order of the run replaces their samplers.
            scheduler: a schedule of the optimizer, or a factory `(optimizer) -> schedule`. `update` steps it.

        Returns:
            The model to call, the optimizer, and the loaders to iterate over, in the order of the arguments. The returned model
            and optimizer have the attributes of the objects that were passed. The training loader yields this rank's part of each
            batch, on the device of this rank.

        Raises:
            ConfigError: an argument is wrong, the backend does not take it, or this is the second call.
            ResourceError: another run uses the run directory, or some ranks did not join.
        """
        fits = self._entered()
        if self._run is not None:
            raise ConfigError("prepare() was called twice: make another Session for another model")
        if not loaders:
            raise ConfigError("prepare() got no data: write prepare(model, optimizer, loader)")
        self._fill_job(model, optimizer, scheduler)
        others = {f"loader_{number}": each for number, each in enumerate(loaders[1:], start=2)} or None
        opened = fits.open({}, loaders[0], others, self._leaving)
        self._run = OwnRun(fits, opened, loaders, self._leaving)
        return self._run.model, self._run.optimizer, self._run.training_loader, *self._run.other_loaders

    def resume(self) -> Position:
        """Load the checkpoint from which this run continues, if there is one. Every rank calls it, after `prepare`.

        There is one after a restart, with `--resume`, and with `resume_from_checkpoint`. Model, optimizer, schedule, random
        generators, `state` and the position in the data are then those of the checkpoint.

        Returns:
            The position from which `epochs` and the training loader continue.

        Raises:
            ConfigError: the run has begun already.
            CheckpointError: the checkpoint does not fit the model.
        """
        state = self._prepared().begin(may_load=True).state
        return Position(state.step, state.epoch, state.samples_in_epoch)

    # ------------------------------------------------------------------ the loop

    def epochs(self) -> Iterator[int]:
        """Return an iterator over the remaining epochs. Every rank must run through it.

        At the end of an epoch, its means are logged, schedules that follow epochs are stepped, and a checkpoint is saved if
        `checkpoint_frequency` says so. A signal, `max_steps` or `stop` ends the iteration.

        Returns:
            An iterator over the numbers of the epochs, from 0 to `epochs - 1`.

        Raises:
            ConfigError: during the iteration: the run continues from a checkpoint that `resume` has not loaded, an epoch made no
                update, or an epoch lacks the metric of the validation that `early_stopping_patience` needs.
        """
        return self._prepared().epochs()

    def backward(self, loss: Any) -> None:
        """Run the backward pass of a batch. Every rank calls it once for each batch of the training loader.

        Args:
            loss: what a `loss_fn` may return: the mean over the samples of the batch, any other tensor (averaged over its
                elements), or a pair (sum, count). The gradients are those of the mean over the whole global batch.

        Raises:
            ConfigError: `loss` is no loss, or this is not the one call for a batch of the training loader.
        """
        self._prepared().steps.backward(loss)

    def update(self) -> bool:
        """Make an update if this batch is the last micro-batch of the update. Every rank calls it after `backward`.

        The gradients are exchanged, clipped and checked; the optimizer and the schedule are stepped.

        Returns:
            Whether this batch was the last micro-batch of the update, see `gradient_accumulation_steps`.

        Raises:
            ConfigError: `backward` was not called for this batch.
            TrainingError: a gradient is not finite, and `nan_policy` is "stop".
        """
        return self._prepared().update()

    def log(self, name: str, value: Any, reduce: str = "mean") -> None:
        """Log a number. A single rank may call it; it is not a collective.

        In a loop over a loader, a mean weights each value by the number of samples in its batch. A value of training is part of
        the next log line, which is written every `log_every_n_steps` updates. The loss of `backward` is logged as `loss`. A call
        with the name `loss` replaces it.

        A name with the prefix `val_` is a metric of the validation of this epoch. It is part of the row of the epoch, to which
        `monitor` refers. If the metric is logged after several updates of an epoch, only the values that were logged after the
        last of these updates count. Values that are logged after the last epoch are added to the row of that epoch.

        Args:
            name: the name of the value.
            value: a number, or a tensor with one element, which may stay on its device.
            reduce: "mean", "sum" or "max", over the updates since the last log line and over the ranks.

        Raises:
            ConfigError: the name is taken, the value is not a number, or the run has not begun, see `resume`.
        """
        self._prepared().log(name, value, reduce)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of `tensor` of all ranks as one tensor, on every rank. Every rank calls it.

        In a loop over a loader, the rows are in the order of the data. Each sample is there once, even if it was repeated on a
        rank that had no sample of its own. Elsewhere the rows come rank by rank.

        Args:
            tensor: a tensor of shape `[samples of this rank, ...]`, or a tensor with a single number and no dimension.

        Returns:
            A tensor of shape `[samples, ...]` on the device of this rank, without a gradient. Single numbers become a tensor of
            shape `[ranks]`, in a loop over a loader without the ranks that have no sample of their own.

        Raises:
            ConfigError: `tensor` is not a tensor.
        """
        rows: torch.Tensor = self._prepared().gather(tensor)
        return rows

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Save a checkpoint now. Every rank calls it, outside of an update: after `update()`, or between two epochs.

        Args:
            path: a directory for the checkpoint, or a file `NAME.safetensors` for the weights alone. None saves into the
                checkpoints of the run, from which `resume` continues.

        Returns:
            The path of the checkpoint.

        Raises:
            ConfigError: the call is inside of an update, or `path` cannot be written.
            TrainingError: the checkpoint of the run cannot be written.
        """
        return self._prepared().save(None if path is None else Path(path))

    def stop(self, reason: str) -> None:
        """End training on all ranks after the same update. One call on any rank is enough.

        Args:
            reason: the reason, as a text. It becomes the `stop_reason` of the run.

        Raises:
            ConfigError: `reason` is not a text, is empty, or is a reason that the package itself uses.
        """
        self._prepared().run.stop(reason)

    # ------------------------------------------------------------------ where this process is

    @property
    def state(self) -> dict[str, Any]:
        """Values of the script that are part of each checkpoint, and that `resume` restores. Those of the main process are saved.

        They may be plain values, containers of them, NumPy arrays and tensors.
        """
        return self._kept.values

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._entered().context.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._entered().context.world_size

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self._entered().context.is_main_process

    @property
    def device(self) -> torch.device:
        """The device of this process, on which the batches are."""
        import torch

        return torch.device(self._entered().context.device)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self._prepared().run_dir

    @property
    def step(self) -> int:
        """The number of updates so far, 0 before `resume`."""
        return self._prepared().step

    def _entered(self) -> FitSession:
        if self._fits is None:
            raise ConfigError("a Session works in its block only: write 'with distributed.Session(...) as s:'")
        return self._fits

    def _prepared(self) -> OwnRun:
        self._entered()
        if self._run is None:
            raise ConfigError(
                "nothing is prepared: call model, optimizer, loader = s.prepare(model, optimizer, loader) first"
            )
        return self._run

    def _fill_job(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Put the arguments of `prepare` into the job of this session. Raises ConfigError if one is wrong."""
        if isinstance(model, Mapping) or not callable(model):
            raise ConfigError(
                f"prepare() got a {type(model).__name__} as its model: pass a module or a factory of one; several models"
                " are trained by Trainer(models=...)"
            )
        if is_model(model):
            raise ConfigError("prepare() takes torch modules: a Keras model is trained by Trainer(model)")
        for name, value in {"optimizer": optimizer, "scheduler": scheduler}.items():
            if not (value is None or callable(value) or hasattr(value, "step")):
                raise ConfigError(
                    f"prepare() got a {type(value).__name__} as its {name}: pass an object or a factory, or set {name}=NAME in Session()"
                )
        self._job.model, self._job.optimizer, self._job.scheduler = model, optimizer, scheduler
        check_named(self._setup.merged, self._job)
        self._setup.check_job()


def _refuse_elsewhere(setup: Setup) -> None:
    """Raise ConfigError if the backend does not train in the script's loop, or if the settings need workers and this is none."""
    plan = setup.plan
    if why := setup.backend.refuses_own_loop:
        raise ConfigError(f"backend={plan.backend!r} does not train in a loop of your own: {why}")
    if setup.is_fit_in_workers:
        script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "SCRIPT"
        raise ConfigError(
            f"a Session with {plan.world_size} process{'es' * (plan.world_size > 1)} on backend {plan.backend!r} runs in workers, and"
            f" this process is not one: run 'python -m distributed.cli train --script {script} --backend {plan.backend}"
            f" --nproc-per-node {plan.nproc_per_node}', or call distributed.launch(function, nproc_per_node={plan.nproc_per_node})"
        )

"""Define the adapter protocol: the methods of a backend, in the order in which the loop calls them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from distributed.callbacks import AVERAGED_WEIGHTS, COUNTS, GRADIENTS, SAMPLES, AveragedWeights, Callback
from distributed.checkpoints.staging import Copying
from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan, ProcessPlan, mixed_precision
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.loggers.logged import Logged
from distributed.loggers.observer import Observer
from distributed.state import (
    DATA_VERSION,
    DataRole,
    Job,
    MicroBatch,
    OnEvent,
    StepResult,
    Sums,
    UpdateBatch,
    WorkerContext,
)

if TYPE_CHECKING:
    from distributed.backends.effects import Need
    from distributed.backends.own_steps import OwnSteps
    from distributed.backends.world import World

OptionsT = TypeVar("OptionsT")
# Possible names of the targets in a dict batch. The first one found is used.
TARGET_NAMES = ("labels", "label", "targets", "target", "y")
_NO_CLUSTER = "no cluster is joined: drop it, or set backend='ray'"


@dataclasses.dataclass(frozen=True)
class If:
    """Hold the refusal of a setting that is refused only under a condition."""

    when: str  # the condition, as the table and the error write it: "on CPUs"
    holds: Callable[[Any], bool]  # called with the adapter, after its settings, options and process plan are set
    reason: str


Refusals = Mapping[str, str | tuple[If, ...]]


class ShardedData(abc.ABC):
    """Yield one rank's part of a data set, in an order that is a pure function of (seed, epoch, position)."""

    num_samples: int | None  # samples of all ranks in an epoch; None for a stream of unknown length
    batch: BatchPlan
    version: int = DATA_VERSION  # version of the order, see `use_version`
    has_own_cursor: bool = (
        False  # whether each rank reads a part of its own, so that a checkpoint needs the cursor of every rank
    )
    notices: Sequence[str] = ()  # notices about this data, shown at the start of a run

    @property
    def updates_per_epoch(self) -> int | None:
        """Number of update batches in an epoch, or None if the length is unknown."""
        if self.num_samples is None:
            return None
        return -(-self.num_samples // self.batch.global_batch_size)

    @abc.abstractmethod
    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        """Yield the update batches of epoch `epoch` after its first `skip` samples, counted over all ranks.

        Every rank gets the same number of update batches.
        """

    def use_version(self, version: int) -> None:
        """Read later epochs in the order and with the random numbers of `version`, see `TrainState.data_version`. Not a collective."""
        self.version = version

    def cursor(self, samples: int) -> dict[str, Any] | None:
        """Return the position of the data set after `samples` samples of the epoch, JSON-able. Not a collective.

        `seek` takes this position. The last update batch may have been read without being used. Return None if the data set
        does not report its position. A resume then reads the used samples again and drops them.
        """
        return None

    def seek(self, cursor: Mapping[str, Any] | None) -> None:
        """Let the next `epoch` begin at `cursor`, if `cursor` belongs to the same epoch and sample. Not a collective.

        With `has_own_cursor`, `cursor["ranks"]` holds the result of the method `cursor` of each rank.
        """

    def close(self) -> None:
        """Stop the worker processes of the loader."""


class MetricsOverAll:
    """Compute metrics over all samples, for metrics that are not means over batches. This base class has no metrics."""

    def begin(self, split: str) -> None:
        """Drop everything kept of the last epoch (`split="train"`) or evaluation (`split="val"`)."""

    def names_over_all(self) -> Sequence[str]:
        """Return the names of the metrics that `measure` computes in evaluation. One metric may yield several values, named NAME_KEY."""
        return ()

    def measure(self, split: str, means: Mapping[str, float], *, is_end: bool = True) -> dict[str, float] | None:
        """Return name -> value of each metric over all samples of the epoch so far ("train") or of the evaluation ("val").

        A collective. `means` are the means over batches of the same samples. With `is_end` no more samples follow, and
        every function is checked. Earlier calls check functions only from time to time.

        Returns None if an evaluation finds a function that is not a mean and not all of its arguments were kept.
        The caller then evaluates again. In training such a function is computed over all samples from the next
        epoch on.
        """
        return {}


class Backend(abc.ABC, Generic[OptionsT]):
    """Run the steps of training with one engine.

    Other parts of an engine are separate objects: `world` communicates (`World`), `measured` computes metrics over all
    samples (`MetricsOverAll`), and `observer` observes training (`Observer`). The registry entry of a backend names the
    `Starting` class that starts its runs. `distributed.testing.fake` contains an adapter without a framework.
    """

    Options: ClassVar[type[Any]]  # frozen dataclass of the options of this backend, checked by the config
    # "setting" or "setting=value" -> why this engine refuses it, always or under conditions, and what to use instead. The
    # settings are checked before any process starts. `distributed backends` shows the table.
    refuses: ClassVar[Refusals] = {}
    # Setting -> what it needs to have an effect under this engine. Contains options of the backend that need more than the
    # backend, and settings whose entry in `distributed.backends.effects` is replaced.
    needs: ClassVar[Mapping[str, tuple[Need, ...]]] = {}
    # What a callback may need (`Callback.needs`) -> why this engine does not have it, and what to use instead.
    refuses_callbacks: ClassVar[Refusals] = {
        GRADIENTS: "its engine does not show them: use a torch backend",
        AVERAGED_WEIGHTS: "its engine keeps none: use a torch backend",
        SAMPLES: "sampling would change the random numbers that its engine draws for training: use a torch backend",
        COUNTS: "its engine does not count FLOPs and tokens: use a torch backend",
    }
    # Why this engine does not train several models with an optimizer each, and what to use instead; empty if it does.
    refuses_several: ClassVar[str] = "it trains one model: use backend 'pytorch-ddp', 'fsdp' or 'ray'"
    # Why this engine does not train in a loop of the script, and what to use instead; empty if it does.
    refuses_own_loop: ClassVar[str] = "its step contains the model and the loss: use Trainer, or a torch backend"
    joins_cluster: ClassVar[bool] = False  # whether the backend's launcher can join the cluster at `address`
    merged: MergedConfig
    config: DistributedConfig
    plan: ProcessPlan
    mixed_precision: str  # "no", "fp16" or "bf16"
    devices_per_process: int = 1  # devices that a process trains on, each with a slice of every micro-batch

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not cls.joins_cluster:
            cls.refuses = {"address": _NO_CLUSTER, "wait": _NO_CLUSTER, **cls.refuses}

    def __init__(self, merged: MergedConfig, options: OptionsT, plan: ProcessPlan) -> None:
        """Check the settings. Also called in the parent before any process starts, so it must be cheap.

        Raises:
            ConfigError: for a setting that the engine refuses.
        """
        self.merged, self.config, self.options, self.plan = merged, merged.config, options, plan
        self.data_parallel_size = plan.data_parallel_size  # number of slices of a micro-batch
        self.mixed_precision = mixed_precision(merged.config, plan.device)
        check_refusals(self)
        self.world: World  # set by `setup`
        self.context: WorkerContext  # rank, world size and device, from `world`
        self.model: Any = None  # the user's model, set by `prepare`
        self.optimizer: Any = None  # updates the model; set by `prepare` for training
        self.users_optimizer: Any = None  # the same optimizer in the form that the user knows
        # Names of the parts of the model whose output depends on the split of a batch, set by `prepare`.
        self.batch_dependent: Sequence[str] = ()
        # Whether there is a schedule that counts updates or epochs (see `scheduler_interval`). Set by `prepare`.
        self.has_schedule = False
        self.averaged_weights: AveragedWeights | None = None  # set by `prepare` unless `refuses_callbacks` refuses it
        self.own_steps: OwnSteps | None = None  # set by `prepare` for a job with `is_own_loop`
        self.before_update: Sequence[Callable[[], None]] = ()  # called when the gradients of an update are complete
        self.job = Job(None)  # what is trained, see `configure`
        self.run_dir: Path | None = None  # directory for an engine's own files, see `configure`
        self.observer = Observer(plan.world_size)
        self.copying = Copying()  # how `checkpoint_async` copies the state
        self.logged = Logged()  # what the user's code logs in this process; a step sets the weight of what it logs
        self.measured = MetricsOverAll()  # set by `prepare`
        self.on_event: OnEvent = lambda event: None

    # ------------------------------------------------------------------ required methods, in the order of a fit
    # Every rank calls each of these methods, in the same order, unless its docstring says otherwise. An error on one rank ends
    # the run, so an adapter catches none.

    @abc.abstractmethod
    def setup(self) -> WorkerContext:
        """Join the other processes, choose the device and return this process's rank among them. A collective.

        Sets `world` and `context`. Called once in each process that trains or evaluates, before anything but `check` and
        `configure`. Raises ResourceError if ranks are missing after `start_timeout`, or if the device cannot be used.
        """

    @abc.abstractmethod
    def batch_size_of(self, data: Any) -> int | None:
        """Return the batch size of a loader, or None for a data set and for a loader whose batch size was not set.

        Not a collective. Also called before `setup`, in a process that starts workers.
        """

    @abc.abstractmethod
    def shard(self, data: Any, batch: BatchPlan, role: DataRole) -> ShardedData:
        """Return this rank's batches of `data`, split as the plan `batch` says.

        Called before `prepare`, because a model may need a batch to be built. A collective: ranks agree on the number
        of samples. Raises ConfigError for data that the engine does not take.
        """

    @abc.abstractmethod
    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        """Build the model, then the optimizer, then the schedule, and return notices to show once.

        Called at most twice: for an evaluation before the first fit, and for the first fit, with the model of the
        evaluation as `job.model`. Sets `model`, `optimizer`, `users_optimizer`, `batch_dependent`, `has_schedule` and
        `measured`. A collective: all ranks start with the weights of rank 0. Raises ConfigError for a job that the
        engine cannot train.
        """

    @abc.abstractmethod
    def load(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        """Begin to load the checkpoint that `save` wrote into `directory`, and return a function that does the rest.

        The world size may have changed since. `state` is the result of `save` on rank 0.

        Large tensors may not be verified yet when this method is called. They are verified while it reads them with `RawTensor.copy_to`,
        and all others before the function is called. If one is damaged, the function is not called, and this method is called again
        with an older checkpoint. It may therefore change only the values of tensors that every load replaces. An engine may also read
        nothing here, and load everything in the function.

        Both are collectives. They raise CheckpointError if the checkpoint does not fit the model.
        """

    @abc.abstractmethod
    def train_step(self, update_batch: UpdateBatch) -> StepResult:
        """Run forward and backward on all micro-batches of `update_batch`, then make one update.

        A collective: all ranks get the same number of micro-batches, and some of these may have no samples. Waits for
        the device only if the gradients must be checked before the update. Raises TrainingError for gradients that are
        not finite if `nan_policy` says so.
        """

    @abc.abstractmethod
    def collect(self, results: Sequence[StepResult]) -> dict[str, Sums]:
        """Return name -> list of (sum, count) over all ranks, as floats, with one pair for each of `results` in order.

        A collective, and the only method that always waits for the device in training. A result without the name has
        (0, 0). The pair of a result does not depend on the other `results`. The positions of log lines and checkpoints
        therefore do not change the bits of an epoch's sums.
        """

    @abc.abstractmethod
    def learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group for the next update. Not a collective.

        The rates include the warm-up (`config.warm_rate`), also the one with which `find_learning_rate` raises the rate.
        """

    @abc.abstractmethod
    def eval_step(self, micro: MicroBatch) -> StepResult:
        """Run forward in evaluation mode without gradients. A collective."""

    @abc.abstractmethod
    def step_schedule(self, metrics: Mapping[str, float] | None, *, is_epoch_end: bool) -> None:
        """Step a schedule that does not count updates. Not a collective.

        Called at the end of each epoch and after each validation inside an epoch. A schedule that counts epochs steps if
        `is_epoch_end`. A schedule that watches a metric steps if there are `metrics`.
        """

    @abc.abstractmethod
    def save(self, directory: Path) -> dict[str, Any]:
        """Write this rank's tensors into the staged checkpoint `directory` and return the rest of the state, JSON-able.

        Only the state that rank 0 returns is stored. The engine chooses the names of its files, and writes each file with
        `checkpoints.tensor_file.write_tensors`, which creates the directories, or with `checkpoints.durable.write_file`. If these keep the
        files in memory first (`checkpoint_async`), `directory` need not exist. A collective. Raises OSError if the disk fails.
        """

    @abc.abstractmethod
    def unwrap(self) -> None:
        """Remove the wrapper that training put around the model, so that the process can exit cleanly.

        Called at the end of each fit, also after a failure, so it is not a collective.
        """

    @abc.abstractmethod
    def rewrap(self) -> None:
        """Wrap the model again after `unwrap`, for a further fit. A collective."""

    @abc.abstractmethod
    def predict_step(self, micro: MicroBatch) -> Any:
        """Return the model's outputs for one micro-batch in evaluation mode, on the host. A collective."""

    @abc.abstractmethod
    def join_outputs(self, parts: list[list[tuple[int, int, Any]]]) -> Any:
        """Return the outputs of `predict` in the order of the samples. Not a collective.

        `parts` holds for each rank a list of (number of the update batch, rank, result of `predict_step`).
        """

    @abc.abstractmethod
    def export(self, path: Path) -> None:
        """Write the model's weights by name into one safetensors file. A collective; the main process writes."""

    @abc.abstractmethod
    def take_weights(self, model: Any, directory: Path) -> Any:
        """Return the user's `model`, built if it is a factory, with the weights of a checkpoint.

        Called in the process that started workers, without `setup`.
        """

    @abc.abstractmethod
    def teardown(self) -> None:
        """Disconnect from the other processes cleanly, and leave no thread running.

        Called at exit, also after a failure, so it must not wait for another rank.
        """

    # ------------------------------------------------------------------ optional methods

    def check(self, job: Job, *, here: bool) -> None:
        """Raise ConfigError for errors in `job` that can be found before processes join each other.

        Called by `Trainer`, also in a process that starts workers. `here` says whether this process trains the job.
        """

    def configure(
        self,
        merged: MergedConfig | None = None,
        *,
        run_dir: Path | None = None,
        on_event: OnEvent | None = None,
        before_update: Sequence[Callable[[], None]] | None = None,
        job: Job | None = None,
    ) -> None:
        """Set the given values. An argument that is None changes nothing. Not a collective.

        Args:
            merged: the settings of the next fit or evaluation, which `prepare` and the steps read.
            run_dir: the run directory of a fit, for the engine's own files. Known before `prepare`.
            on_event: called with notices and warnings, for the display. Known before `setup`.
            before_update: called before each update of the next fit, if `refuses_callbacks` does not refuse it.
            job: what is trained, which says how data is read. Known before `setup`.
        """
        if merged is not None:
            self.merged, self.config = merged, merged.config
        self.run_dir = run_dir or self.run_dir
        self.on_event = on_event or self.on_event
        self.before_update = self.before_update if before_update is None else before_update
        self.job = job or self.job

    def own_generators(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the global random generators have the states of training. The caller's states
        are restored at its end."""
        return contextlib.nullcontext()

    def reassemble(self) -> None:
        """Make the user's model whole on each rank, if training sharded it.

        Called after each fit that succeeds. A collective.
        """

    @contextlib.contextmanager
    def as_trained(self) -> Iterator[None]:
        """Shard the model as in training within the block. Entering and leaving the block are collectives."""
        yield

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[Any]:
        """Yield the user's model, whole, on the main process, and None on other ranks. Entering and leaving the block
        are collectives."""
        yield self.model if self.context.is_main_process else None

    def _warn(self, text: str) -> None:
        """Show a warning from this rank."""
        self.on_event({"kind": "warning", "text": text})

    def _notice(self, text: str) -> None:
        """Show a notice, on the main process only."""
        if self.context.is_main_process:
            self.on_event({"kind": "notice", "text": text})


def reason_of(backend: Backend[Any], why: str | tuple[If, ...]) -> str:
    """Return the refusal `why` as text for a message: its condition, if any, and its reason. Return "" if no condition holds."""
    if isinstance(why, str):
        return f": {why}"
    return next((f" {each.when}: {each.reason}" for each in why if each.holds(backend)), "")


def check_refusals(backend: Backend[Any]) -> None:
    """Raise ConfigError for a setting that the engine of `backend` refuses."""
    for refused, why in backend.refuses.items():
        name, _, wanted = refused.partition("=")
        value, default = _value(backend.config, name)
        meant = backend.mixed_precision if name == "mixed_precision" else value
        if not (str(meant) == wanted if wanted else meant != default):
            continue
        if reason := reason_of(backend, why):
            raise ConfigError(f"{name}={value!r} does not work with backend={backend.plan.backend!r}{reason}")


def check_callbacks(backend: Backend[Any], callbacks: Sequence[Callback]) -> None:
    """Raise ConfigError for a callback that needs a feature that the engine of `backend` lacks or another callback uses."""
    averaging = [type(callback).__name__ for callback in callbacks if AVERAGED_WEIGHTS in callback.needs]
    if len(averaging) > 1:
        raise ConfigError(
            f"{' and '.join(averaging)} both average the weights, but a run keeps one average only: drop one"
        )
    if backend.config.checkpoint_trainable_only:
        for callback in callbacks:
            if callback.trains_later:
                raise ConfigError(
                    f"checkpoint_trainable_only=True does not work with {type(callback).__name__}, which begins to train"
                    " parameters during the fit: drop one of them"
                )
    for callback in callbacks:
        overrides = type(callback).on_before_update is not Callback.on_before_update
        for need in dict.fromkeys((*callback.needs, *((GRADIENTS,) if overrides else ()))):
            if reason := reason_of(backend, backend.refuses_callbacks.get(need, ())):
                raise ConfigError(
                    f"{type(callback).__name__} needs {need}, which backend={backend.plan.backend!r} does not have{reason}"
                )


def _value(config: DistributedConfig, name: str) -> tuple[Any, Any]:
    """Return (value, default) of a setting, or of an option in an option group that every backend shares."""
    group, _, option = name.rpartition(".")
    holder = config.options(group) if group else config
    return getattr(holder, option), type(holder).__dataclass_fields__[option].default

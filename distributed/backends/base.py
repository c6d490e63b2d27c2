"""Define the adapter protocol: the methods of a backend, in the order in which the loop calls them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan, ProcessPlan, mixed_precision
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.loggers.observer import Observer
from distributed.state import DataRole, Job, MicroBatch, StepResult, Sums, UpdateBatch, WorkerContext

if TYPE_CHECKING:
    from distributed.backends.effects import Need
    from distributed.backends.world import World

OptionsT = TypeVar("OptionsT")
Report = Callable[[dict[str, Any]], None]  # takes notices and warnings, as {"kind": "warning", "text": ...}
# Names of the entry of a dict batch that `loss_fn` compares with the outputs.
TARGET_NAMES = ("labels", "label", "targets", "target", "y")
_NO_CLUSTER = "no cluster is joined: drop it, or set backend='ray'"


@dataclasses.dataclass(frozen=True)
class If:
    """Hold a refusal of a setting that applies only under a condition."""

    when: str  # in the words of the table and of the error: "on CPUs"
    holds: Callable[[Any], bool]  # called with the adapter, after its settings, options and process plan are set
    reason: str


Refusals = Mapping[str, str | tuple[If, ...]]


class ShardedData(abc.ABC):
    """Yield one rank's part of a data set, in an order that is a pure function of (seed, epoch, position)."""

    num_samples: int | None  # samples of all ranks in an epoch; None for a stream of unknown length
    batch: BatchPlan

    @property
    def updates_per_epoch(self) -> int | None:
        """Number of update batches in an epoch, or None where the length is unknown."""
        if self.num_samples is None:
            return None
        return -(-self.num_samples // self.batch.global_batch_size)

    @abc.abstractmethod
    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        """Yield the update batches of epoch `epoch` after its first `skip` samples, counted over all ranks.

        Every rank gets the same number of update batches.
        """

    def close(self) -> None:
        """Stop the worker processes of the loader."""


class MetricsOverAll:
    """Compute the metrics that are not means of batches over all samples. This class has no metrics."""

    def begin(self, split: str) -> None:
        """Forget what was kept of the epoch (`split="train"`) or of the evaluation (`split="val"`)."""

    def names_over_all(self) -> Sequence[str]:
        """Return the names of the metrics that `measure` computes in evaluation. One metric may yield several values, named NAME_KEY."""
        return ()

    def measure(self, split: str, means: Mapping[str, float], *, is_end: bool = True) -> dict[str, float] | None:
        """Return name -> value of each metric over all samples of the epoch so far ("train") or of the evaluation ("val").

        A collective. `means` are the means over batches of the same samples. `is_end` says that no more samples come, so that every
        function is checked now. Before the end, functions are checked now and then.

        Returns None in an evaluation where a function turned out to be no mean and its arguments were not all kept. The caller then
        evaluates again. In training such a function is computed from the next epoch on.
        """
        return {}


class Backend(abc.ABC, Generic[OptionsT]):
    """Run the steps of training with one engine.

    Further parts of an engine are objects of their own: `world` communicates (`World`), `measured` holds the metrics over all samples
    (`MetricsOverAll`), `observer` shows what can be observed (`Observer`), and the `Starting` of its registry row starts its runs.
    `distributed.testing.fake` holds an adapter without a framework.
    """

    Options: ClassVar[type[Any]]  # frozen dataclass of the options of this backend, checked by the config
    # "setting" or "setting=value" -> why this engine refuses it, always or under conditions, and what to use instead. Such a
    # setting is refused before any process starts. `distributed backends` shows the table.
    refuses: ClassVar[Refusals] = {}
    # Setting -> what it needs to have an effect under this engine: options of the backend with further needs, and settings
    # for which the row in `distributed.backends.effects` does not hold.
    needs: ClassVar[Mapping[str, tuple[Need, ...]]] = {}
    joins_cluster: ClassVar[bool] = False  # whether its launcher can join the cluster at `address`
    merged: MergedConfig
    config: DistributedConfig
    plan: ProcessPlan
    mixed_precision: str  # "no", "fp16" or "bf16"
    devices_per_process: int = 1  # devices that a process trains on, each with a slice of every micro-batch

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not cls.joins_cluster:
            cls.refuses = {"address": _NO_CLUSTER, **cls.refuses}

    def __init__(self, merged: MergedConfig, options: OptionsT, plan: ProcessPlan) -> None:
        """Check the settings. Also called in the parent before any process starts, so it must be cheap.

        Raises:
            ConfigError: for a setting that the engine refuses.
        """
        self.merged, self.config, self.options, self.plan = merged, merged.config, options, plan
        self.data_parallel_size = plan.data_parallel_size  # into how many slices a micro-batch is cut
        self.mixed_precision = mixed_precision(merged.config, plan.device)
        check_refusals(self)
        self.world: World  # set by `setup`
        self.context: WorkerContext  # of `world`
        self.model: Any = None  # the user's model, set by `prepare`
        self.optimizer: Any = None  # updates the model; set by `prepare` for training
        self.users_optimizer: Any = None  # the same optimizer in the form that the user knows
        # Names of the parts of the model whose output depends on the split of a batch, set by `prepare`.
        self.batch_dependent: Sequence[str] = ()
        # Whether a schedule counts updates or epochs, see `scheduler_interval`. Set by `prepare`.
        self.has_schedule = False
        self.run_dir: Path | None = None  # for an engine's own files, see `configure`
        self.observer = Observer(plan.world_size)
        self.measured = MetricsOverAll()  # set by `prepare`
        self.report: Report = lambda event: None

    # ------------------------------------------------------------------ what every engine does, in the order of a fit
    # Every rank calls each of these methods, in the same order, unless its docstring says otherwise. An error on one rank ends
    # the run, so an adapter catches none.

    @abc.abstractmethod
    def setup(self) -> WorkerContext:
        """Join the other processes, choose the device and return this process among them. A collective.

        Sets `world` and `context`. Called once in each process that trains or evaluates, before anything but `check` and
        `configure`. Raises ResourceError if ranks are missing after `start_timeout`, or if the device cannot be used.
        """

    @abc.abstractmethod
    def batch_size_of(self, data: Any) -> int | None:
        """Return the batch size of a loader, or None for a data set and for a loader whose batch size was not set.

        No collective. Also called in a process that starts workers, before `setup`.
        """

    @abc.abstractmethod
    def shard(self, data: Any, batch: BatchPlan, role: DataRole) -> ShardedData:
        """Return this rank's batches of `data`, cut as `batch` says.

        Called before `prepare`, as a model may need a batch to be built. A collective: ranks agree on the number of samples.
        Raises ConfigError for data that the engine does not take.
        """

    @abc.abstractmethod
    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        """Build the model, then the optimizer, then the schedule, and return notices to show once.

        Called once for evaluation and once for the first fit; then `job.model` is the model that was built before. Sets `model`,
        `optimizer`, `users_optimizer`, `batch_dependent`, `has_schedule` and `measured`. A collective: all ranks start with the
        weights of rank 0. Raises ConfigError for what cannot be trained.
        """

    @abc.abstractmethod
    def load(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Load what `save` wrote in `directory` at any world size. `state` is what `save` returned on rank 0.

        A collective. Raises CheckpointError where the checkpoint does not fit the model.
        """

    @abc.abstractmethod
    def train_step(self, update_batch: UpdateBatch) -> StepResult:
        """Run forward and backward on all micro-batches of `update_batch`, then make one update.

        A collective: all ranks get the same number of micro-batches, of which some may have no samples. Waits for the device only
        where the gradients must be checked before the update. Raises TrainingError as `nan_policy` says.
        """

    @abc.abstractmethod
    def collect(self, results: Sequence[StepResult]) -> dict[str, Sums]:
        """Return name -> (sum, count) over all ranks of each of the `results` in order, as floats.

        A collective; the only wait for the device in training. A result without the name has (0, 0). The pair of a result does
        not depend on the other `results`: log lines and checkpoints do not change the bits of the sums of an epoch.
        """

    @abc.abstractmethod
    def learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group for the next update. No collective.

        With `config.warm_rate` in it, by which the search for a learning rate raises the rate from update to update.
        """

    @abc.abstractmethod
    def eval_step(self, micro: MicroBatch) -> StepResult:
        """Run forward in evaluation mode without gradients. A collective."""

    @abc.abstractmethod
    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Step a schedule that counts epochs, or one that depends on one of `metrics`. No collective."""

    @abc.abstractmethod
    def save(self, directory: Path) -> dict[str, Any]:
        """Write this rank's tensors into the staged checkpoint `directory` and return the rest of the state, JSON-able.

        What rank 0 returns is kept. The names of the files are the engine's own; `checkpoints.durable.write_file` writes one.
        A collective. Raises OSError where the disk refuses a file.
        """

    @abc.abstractmethod
    def unwrap(self) -> None:
        """Remove the wrapper that training put around the model, so that the process can end in order.

        Called at the end of each fit, also after a failure: no collective.
        """

    @abc.abstractmethod
    def rewrap(self) -> None:
        """Wrap the model again after `unwrap`, for a further fit. A collective."""

    @abc.abstractmethod
    def predict_step(self, micro: MicroBatch) -> Any:
        """Return the model's outputs for one micro-batch in evaluation mode, on the host. A collective."""

    @abc.abstractmethod
    def join_outputs(self, parts: list[list[tuple[int, int, Any]]]) -> Any:
        """Return the outputs of `predict` in the order of the samples. No collective.

        `parts` holds, for each rank, (number of the update batch, rank, what `predict_step` returned).
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
        """Leave the other processes in order, and leave no thread behind.

        Called at exit, also after a failure, so it waits for no rank.
        """

    # ------------------------------------------------------------------ what an engine may do besides

    def check(self, job: Job, *, here: bool) -> None:
        """Raise ConfigError for what is known to be wrong with `job` before any process joins another.

        Called by `Trainer`, also in a process that starts workers. `here` says that this process trains it.
        """

    def configure(
        self, merged: MergedConfig | None = None, *, run_dir: Path | None = None, report: Report | None = None
    ) -> None:
        """Set what is known at this point. Arguments that are None change nothing. No collective.

        Args:
            merged: the settings of the next fit or evaluation, which `prepare` and the steps read.
            run_dir: the run directory of a fit, for the engine's own files. Known before `prepare`.
            report: called with notices and warnings, for the display. Known before `setup`.
        """
        if merged is not None:
            self.merged, self.config = merged, merged.config
        self.run_dir = run_dir or self.run_dir
        self.report = report or self.report

    def own_generators(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which the global random generators are those of training. The caller's are put back after it."""
        return contextlib.nullcontext()

    def reassemble(self) -> None:
        """Make the user's model whole on each rank, where training cut it over the ranks.

        Called after each fit that did not fail. A collective.
        """

    @contextlib.contextmanager
    def as_trained(self) -> Iterator[None]:
        """Cut the model over the ranks as in training within the block. A collective, when entered and when left."""
        yield

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[Any]:
        """Yield the user's model, whole, on the main process, and None on the others. A collective, when entered and when left."""
        yield self.model if self.context.is_main_process else None

    def _warn(self, text: str) -> None:
        """Show a warning from this rank."""
        self.report({"kind": "warning", "text": text})

    def _notice(self, text: str) -> None:
        """Show a notice, on the main process only."""
        if self.context.is_main_process:
            self.report({"kind": "notice", "text": text})


def check_refusals(backend: Backend[Any]) -> None:
    """Raise ConfigError for a setting that the engine of `backend` refuses."""
    for refused, why in backend.refuses.items():
        name, _, wanted = refused.partition("=")
        value, default = _value(backend.config, name)
        meant = backend.mixed_precision if name == "mixed_precision" else value
        if not (str(meant) == wanted if wanted else meant != default):
            continue
        text = f"{name}={value!r} does not work with backend={backend.plan.backend!r}"
        if isinstance(why, str):
            raise ConfigError(f"{text}: {why}")
        for each in why:
            if each.holds(backend):
                raise ConfigError(f"{text} {each.when}: {each.reason}")


def _value(config: DistributedConfig, name: str) -> tuple[Any, Any]:
    """Return (value, default) of a setting, or of an option in a group that every backend shares."""
    group, _, option = name.rpartition(".")
    holder = config.options(group) if group else config
    return getattr(holder, option), type(holder).__dataclass_fields__[option].default

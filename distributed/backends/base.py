"""The adapter protocol: what a backend must do. Every rank calls every verb, in the same order."""

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
from distributed.state import DataRole, Group, Job, MicroBatch, StepResult, Sums, WorkerContext

if TYPE_CHECKING:
    from distributed.backends.effects import Need
    from distributed.backends.world import World

OptionsT = TypeVar("OptionsT")
Report = Callable[[dict[str, Any]], None]  # takes notices and warnings, as {"kind": "warning", "text": ...}
TARGET_NAMES = (
    "labels",
    "label",
    "targets",
    "target",
    "y",
)  # of the entry of a dict batch that `loss_fn` compares with
_NO_CLUSTER = "no cluster is joined: drop it, or set backend='ray'"


@dataclasses.dataclass(frozen=True)
class If:
    """A refusal that holds under a condition alone."""

    when: str  # in the words of the table and of the error: "on CPUs"
    holds: Callable[[Any], bool]  # asked with the adapter, whose settings, options and processes are known
    reason: str


Refusals = Mapping[str, str | tuple[If, ...]]


class ShardedData(abc.ABC):
    """One rank's part of a data set, in an order that is a pure function of (seed, epoch, position)."""

    num_samples: int | None  # global samples an epoch; None for a stream of unknown length
    batch: BatchPlan

    @property
    def updates_per_epoch(self) -> int | None:
        """Groups an epoch yields; None where the length is unknown."""
        if self.num_samples is None:
            return None
        return -(-self.num_samples // self.batch.global_batch_size)

    @abc.abstractmethod
    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Group]:
        """The groups of epoch `epoch` after its first `skip` global samples. The same number on every rank."""

    def close(self) -> None:
        """Stop loader processes."""


class MetricsOverAll:
    """The metrics that are computed over all samples, not as means of batches. This class has none."""

    def begin(self, split: str) -> None:
        """Forget what was kept of the epoch ("train") or of an evaluation ("val")."""

    def names_over_all(self) -> Sequence[str]:
        """Return the names of the metrics that `measure` computes in evaluation. One may give several, named NAME_KEY."""
        return ()

    def measure(self, split: str, means: Mapping[str, float], *, is_end: bool = True) -> dict[str, float] | None:
        """Return name -> value of each metric over all samples of the epoch so far ("train") or of the evaluation ("val").

        `means` are those of the same samples. `is_end` says that no more samples come, so that every mean must be right now.
        Before that, functions are checked now and then. None means that a function turned out to be no mean, and that not all
        of what it is computed from was kept: evaluate again. In training the function is then computed from the next epoch on.
        A collective.
        """
        return {}


class Backend(abc.ABC, Generic[OptionsT]):
    """One engine. `distributed.testing` holds one without a framework, for tests of what stands on the adapters."""

    Options: ClassVar[type[Any]]  # frozen dataclass of the settings only this backend has, checked by the config
    # "setting" or "setting=value" -> why this engine refuses it and what to use instead, always or under conditions: refused
    # before any process starts, and what `distributed backends` shows.
    refuses: ClassVar[Refusals] = {}
    # What settings need for an effect under this engine: its own options that need more than to be chosen, and others where
    # the row of `distributed.backends.effects` does not hold.
    needs: ClassVar[Mapping[str, tuple[Need, ...]]] = {}
    joins_cluster: ClassVar[bool] = False  # whether its launcher knows what to do with `address`
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
        """Cheap; refuses what it cannot honour. Called in the parent too, before any process starts."""
        self.merged, self.config, self.options, self.plan = merged, merged.config, options, plan
        self.data_parallel_size = plan.world_size  # into how many slices a micro-batch is cut
        self.mixed_precision = mixed_precision(merged.config, plan.device)
        check_refusals(self)
        self.world: World  # after `setup`
        self.context: WorkerContext  # of `world`
        self.model: Any = None  # the user's module, once it is prepared
        self.optimizer: Any = None  # what updates it, once it is prepared for training
        self.users_optimizer: Any = None  # the same as the user knows it
        self.batch_dependent: Sequence[str] = ()  # its parts whose output differs with the split of a batch; then known
        self.has_schedule = (
            False  # whether a schedule counts updates or epochs, see `scheduler_interval`; once it is prepared
        )
        self.run_dir: Path | None = None  # for an engine's own files, see `configure`
        self.observer = Observer(plan.world_size)
        self.measured = MetricsOverAll()  # of the model, once it is prepared
        self.report: Report = lambda event: None

    def check(self, job: Job, *, here: bool) -> None:
        """Refuse what can be known to be wrong with `job` by now; `here`: this process will train it. Called by Trainer, in
        the parent too."""

    def configure(
        self, merged: MergedConfig | None = None, *, run_dir: Path | None = None, report: Report | None = None
    ) -> None:
        """Take up what is known by now; None leaves things as they are. No collective.

        Args:
            merged: the settings of the next fit or evaluation, which `prepare` and the steps read.
            run_dir: the run directory of a fit, for the engine's own files. Known before `prepare`.
            report: called with notices and warnings, for the display. Known before `setup`.
        """
        if merged is not None:
            self.merged, self.config = merged, merged.config
        self.run_dir = run_dir or self.run_dir
        self.report = report or self.report

    @abc.abstractmethod
    def setup(self) -> WorkerContext:
        """Join the group, pick the device, seed. Called by Trainer, once per worker."""

    @abc.abstractmethod
    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        """Build model, then optimizer, then schedule. Returns notices to show once (defaults chosen, rates scaled)."""

    @abc.abstractmethod
    def batch_size_of(self, data: Any) -> int | None:
        """The batch size that a loader was given, where it counts as set; None for a data set. Also before `setup`."""

    @abc.abstractmethod
    def take_weights(self, model: Any, directory: Path) -> Any:
        """The user's `model` (built, if it is a factory) with the weights of a checkpoint, in a process that trained nothing."""

    @abc.abstractmethod
    def shard(self, data: Any, batch: BatchPlan, role: DataRole) -> ShardedData:
        """This rank's batches of `data`."""

    @abc.abstractmethod
    def train_step(self, group: Group) -> StepResult:
        """Forward and backward on all micro-batches, then ONE update. No host sync but the NaN check before the update."""

    @abc.abstractmethod
    def eval_step(self, micro: MicroBatch) -> StepResult:
        """Forward in eval mode without gradients."""

    @abc.abstractmethod
    def predict_step(self, micro: MicroBatch) -> Any:
        """The model's outputs for one micro-batch, on the host, as `join_outputs` takes them; eval mode."""

    @abc.abstractmethod
    def collect(self, results: Sequence[StepResult]) -> dict[str, Sums]:
        """Return name -> (sum, count) over all ranks of each of the `results` in order, as floats.

        A collective; the only host sync of training. A result without the name has (0, 0). The pair of a result does not depend on
        the other `results`: the sums of an epoch are the same bits wherever log lines and checkpoints cut it.
        """

    def own_generators(self) -> contextlib.AbstractContextManager[None]:
        """Within it the global random generators are the training's own; the caller's are put back after it."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def learning_rates(self) -> list[float]:
        """The rate of each parameter group for the next update."""

    @abc.abstractmethod
    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Step a schedule that counts epochs (`scheduler_interval='epoch'`, or one that watches a metric)."""

    @abc.abstractmethod
    def save(self, directory: Path) -> dict[str, Any]:
        """Write my tensors into the staged checkpoint `directory`; return the JSON-able rest (rank 0's is kept)."""

    @abc.abstractmethod
    def load(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Take up what `save` wrote, at any world size. `state` is what `save` returned on rank 0."""

    @abc.abstractmethod
    def export(self, path: Path) -> None:
        """The model's weights by name in one safetensors file; all ranks call it, the main process writes."""

    @abc.abstractmethod
    def join_outputs(self, parts: list[list[tuple[int, int, Any]]]) -> Any:
        """`predict`'s answer out of every rank's (number of the group, rank, outputs), in the order of the samples."""

    def reassemble(self) -> None:
        """After training that did not fail: what lies cut over the ranks and is the user's to hold becomes whole again."""

    @contextlib.contextmanager
    def as_trained(self) -> Iterator[None]:
        """Within it the model is cut as in training, also after `reassemble`. Every rank enters and leaves it."""
        yield

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[Any]:
        """The user's model, whole, on the main process; None on the others. Every rank enters and leaves it."""
        yield self.model if self.context.is_main_process else None

    @abc.abstractmethod
    def unwrap(self) -> None:
        """Drop what was put around the model for training, so that the process can end in order."""

    @abc.abstractmethod
    def rewrap(self) -> None:
        """Put it around the model again, for a further `fit`."""

    @abc.abstractmethod
    def teardown(self) -> None:
        """Orderly end, always called; releases the group and leaves no thread. After a failure it must not wait for others."""

    def _warn(self, text: str) -> None:
        """Show a warning of this rank."""
        self.report({"kind": "warning", "text": text})

    def _notice(self, text: str) -> None:
        """Show a notice of the main process."""
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
        said = f"{name}={value!r} does not work with backend={backend.plan.backend!r}"
        if isinstance(why, str):
            raise ConfigError(f"{said}: {why}")
        for each in why:
            if each.holds(backend):
                raise ConfigError(f"{said} {each.when}: {each.reason}")


def _value(config: DistributedConfig, name: str) -> tuple[Any, Any]:
    """Return (value, default) of a setting, or of an option in a group that every backend shares."""
    group, _, option = name.rpartition(".")
    holder = config.options(group) if group else config
    return getattr(holder, option), type(holder).__dataclass_fields__[option].default

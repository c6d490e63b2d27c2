"""A sweep of a script from the command line: check it, run it below a subreaper that ends all its processes, show
and record it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import selectors
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.config.addresses import refuse_address
from distributed.config.fields import rules
from distributed.config.merging import Overrides, merge, split_sweep
from distributed.config.plan import plan_processes
from distributed.config.reading import parse_yaml
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, DistributedError, shown
from distributed.launcher.start import launch_request
from distributed.launching.script import check_script
from distributed.launching.stopping import Signals
from distributed.launching.subreaper import Subreaper
from distributed.loggers.registry import check_directories, check_libraries
from distributed.runs.directory import choose_run_dir
from distributed.runs.processes import STOP_SIGNALS
from distributed.state import OnEvent
from distributed.tuning.engine import engine, record_line
from distributed.tuning.jobs import script_job
from distributed.tuning.mlflow_run import run_of_sweep
from distributed.tuning.plan import (
    SweepPlan,
    bundles_of,
    check_fits,
    check_pairing,
    check_scheduler,
    here,
    mode_of,
    total,
)
from distributed.tuning.proposals import check_search, make_proposals
from distributed.tuning.space import Dimension, Space, read_space
from distributed.tuning.sweep import Sweep, as_arguments, open_sweep, scores
from distributed.tuning.table import TrialTable

if TYPE_CHECKING:
    from distributed.tuning.mlflow_run import SweepRun

_LEAVING_S = 90.0  # time for trials to save and leave after a stop; then all processes are killed
_SHOWN = 5  # number of proposals that a dry run shows
_BETWEEN = math.sqrt(2) - 1  # position within a range; the value there is not an integer if the ends are integers


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """Flags of the sweep on the command line."""

    search_space: str | None
    metric: str = "val_loss"
    mode: str | None = None
    scheduler: str | None = None
    search: str = "random"
    run_dir: str | None = None
    resume: bool = False
    num_samples: int | None = None
    max_concurrent: int | None = None
    max_failures: int = 0
    cpus_per_trial: int | None = None
    trials_per_gpu: int = 1
    scheduler_options: Mapping[str, float] = dataclasses.field(default_factory=dict)


class ScriptSweep:
    """A sweep whose trials run a script.

    The constructor raises ConfigError if the sweep cannot run. Nothing is started or written before `run`.
    """

    def __init__(self, overrides: Overrides, options: SweepOptions) -> None:
        if overrides.script is None:
            raise ConfigError("no script to run: add --script train.py")
        if options.search_space is None:
            raise ConfigError("no search space: add --search-space space.yaml")
        if options.resume and options.run_dir is None:
            raise ConfigError("--resume needs the directory of the sweep: add --run-dir DIR")
        self._options = options
        self.mode = mode_of(options.metric, options.mode)
        check_script(overrides.script)
        self.space = read_space(options.search_space)
        self.num_samples = check_search(options.search, self.space, options.num_samples)
        self.scheduler, self.scheduler_options = check_scheduler(options.scheduler, options.scheduler_options)
        check_pairing(self.scheduler, options.search, options.max_concurrent)
        self._first, self._notices = check_names(self.space, overrides)
        self.overrides, self._address = self._of_trials(overrides)
        self._is_here = engine().has_own_cluster(self._address)
        refuse_address(options.run_dir or "", "a sweep")
        self.directory = Path(options.run_dir or choose_run_dir(f"tune-{Path(overrides.script).stem}")).absolute()
        self._job = script_job(self.overrides, options.metric, self.mode, self.directory)
        self.overrides = self._job.overrides
        self._merged = merge(self.overrides, {})
        check_libraries(self._merged)
        self.bundles = self._bundles()
        self.at_once = self._concurrency()
        if self._is_here:  # find errors that every trial would have; this cannot be checked for other machines
            launch_request(self._job.overrides_with(self._first), None)
        engine().check_here(self._plan())

    def _of_trials(self, overrides: Overrides) -> tuple[Overrides, str | None]:
        """Return (the overrides of every trial, the address of the cluster that runs the trials)."""
        return overrides.without(["address"]), overrides.value("address")

    def _bundles(self) -> tuple[Mapping[str, float], ...]:
        """Return the resources of a trial. They must be on one node, because the workers are child processes of the
        trial."""
        plan = plan_processes(self._merged.config)
        if plan.num_nodes > 1:
            raise ConfigError(
                f"num_nodes={plan.num_nodes} does not work in a sweep, where each trial runs on one node: drop it"
            )
        cpus = float(self._options.cpus_per_trial or plan.nproc_per_node)
        per_gpu = self._options.trials_per_gpu
        if plan.device != "cuda":
            if per_gpu > 1:
                raise ConfigError(f"trials_per_gpu={per_gpu} has no effect on {plan.device}: drop it")
            return bundles_of({"cpu": cpus})
        if per_gpu > 1 and plan.nproc_per_node > 1:
            raise ConfigError(f"trials_per_gpu={per_gpu} needs trials of one process: drop it, or set nproc_per_node=1")
        return bundles_of({"cpu": cpus, "gpu": plan.nproc_per_node / per_gpu})

    def _concurrency(self) -> int | None:
        if not self._is_here:
            return None  # only known after joining the cluster
        there, needs = here(), total(self.bundles)
        check_fits(needs, there, "this machine")
        fit = min(int(there[name] / amount + 1e-9) for name, amount in needs.items() if amount)
        return min(fit, self.num_samples, self._options.max_concurrent or fit)

    def _plan(self, sweep: Sweep | None = None) -> SweepPlan:
        return SweepPlan(
            self.directory, self._job, self.space, self._options.metric, self.mode, self.num_samples, self.bundles,
            search=self._options.search, scheduler=self.scheduler, scheduler_options=self.scheduler_options,
            seed=self._merged.config.seed, max_concurrent=self._options.max_concurrent,
            max_failures=self._options.max_failures, address=self._address,
            earlier=tuple(record for record, _ in scores(sweep)) if sweep is not None else (),
            scratch=engine().new_scratch() if sweep is not None else None,
        )  # fmt: skip

    # ------------------------------------------------------------------ what is shown

    def start_lines(self) -> list[str]:
        """Return lines that describe what will run."""
        each = " and ".join(f"{amount:g} {name}" for name, amount in total(self.bundles).items() if amount)
        once = "" if self.at_once is None else f", {self.at_once} at once"
        scheduler = f", scheduler {self.scheduler}" if self.scheduler else ""
        return [
            *self._notices, f"{self.num_samples} trials{once}, {each} each; search {self._options.search}{scheduler};"
            f" best is the {'smallest' if self.mode == 'min' else 'largest'} {self._options.metric}",
            f"run directory: {os.path.relpath(self.directory)}",
        ]  # fmt: skip

    def dry_run_lines(self) -> list[str]:
        """Return lines with the plan and its first proposals."""
        proposals = make_proposals(self._options.search, self.space, self._merged.config.seed)
        lines = []
        for number in range(min(_SHOWN, self.num_samples)):
            settings, others, _ = split_sweep(proposals.ask())
            words = [f"{name}={value}" for name, value in settings.items()] + list(as_arguments(others))
            lines.append(f"  {number:05d}  {' '.join(words)}")
        return [*self.start_lines(), "first proposals:", *lines, "nothing was started (--dry-run)"]

    # ------------------------------------------------------------------ the run

    def run(self) -> int:
        """Run the sweep until it ends and return the exit code."""
        configuration = {
            "script": Path(str(self.overrides.script)).name, "script_args": list(self.overrides.script_args),
            "settings": self.overrides.values(), "search_space": _space_text(str(self._options.search_space)),
            "search": self._options.search, "scheduler": self.scheduler, "num_samples": self.num_samples,
            **({"scheduler_options": dict(self.scheduler_options)} if self.scheduler_options else {}),
        }  # fmt: skip
        check_directories(self._merged)
        sweep = open_sweep(self.directory, self._options.metric, self.mode, configuration, self._options.resume)
        sweep.recall(self.space)
        plan = self._plan(sweep)
        plan.stop_file.unlink(missing_ok=True)
        tracked = run_of_sweep(
            sweep,
            self._merged,
            str(self.overrides.script),
            configuration,
            lambda text: table.print_line(f"warning: {text}"),
        )
        with Signals() as signals:
            subreaper = Subreaper(lambda on_event: _work(plan, on_event), self.directory / "search.log", plan.scratch)
            table = TrialTable(sweep, self.num_samples, self.start_lines())
            end = _End()
            try:
                if tracked is not None:
                    tracked.start()
                end = _SweepWatch(plan, sweep, subreaper, signals, table, tracked).run()
            finally:
                subreaper.end()
                plan.stop_file.unlink(missing_ok=True)
                sweep.interrupt()
                sweep.write()
                best = sweep.write_best(self.overrides)
                if tracked is not None:
                    tracked.close(end.status)
                table.close(best)
        if end.signum:
            return 128 + end.signum
        if end.error is not None:
            sys.stderr.write(shown(f"error: {end.error}\n", keep="\n\t"))
        return end.exit_code


def check_names(space: Space, overrides: Overrides) -> tuple[dict[str, Any], list[str]]:
    """Check the names of a script's search space.

    Returns:
        `(first, notices)`: values of a first trial, and lines for the user.

    Raises:
        ConfigError: a setting cannot be varied, or is given as a flag too.
    """
    first = {name: _some(each)[0] for name, each in space.items()}
    settings, others, notices = split_sweep(first)
    known = rules(DistributedConfig)
    for name in settings:
        if known[name].section == "Resources" or name in ("checkpoint_dir", "resume_from_checkpoint"):
            raise ConfigError(
                f"{name} cannot be varied, because a sweep varies hyperparameters only: set it for all trials"
            )
        if name in overrides.flag and not isinstance(settings[name], Mapping):
            raise ConfigError(
                f"{name} is in the search space and set to {overrides.flag[name]!r} too: drop one of them"
            )
    for name, each in space.items():
        _check_values(name, each)
    _check_argument_names(others)
    _check_once([split_sweep({name: value})[0] for name, value in first.items()], list(space))
    if "checkpoint_dir" in overrides.values():
        raise ConfigError("checkpoint_dir would be shared by all trials: drop it, each has its own run directory")
    arguments = [f"{name} is not a setting: the script gets it as --{name}" for name in others]
    return first, [*overrides.notices, *notices, *arguments]


def _some(each: Dimension) -> tuple[Any, ...]:
    """Return some values of a dimension: all of them, its ends, or one drawn by a library."""
    if each.sampler is not None:
        import numpy

        return (each.sampler(numpy.random.RandomState(0)),)
    return each.values or (each.low, each.high)


def _check_values(name: str, each: Dimension) -> None:
    """Raise ConfigError if the dimension contains a value that the setting of this name cannot have."""
    for value in _some(each):
        DistributedConfig(**split_sweep({name: value})[0])
    if each.kind in ("uniform", "loguniform"):
        try:
            DistributedConfig(**split_sweep({name: each.at(_BETWEEN)})[0])
        except ConfigError as error:
            raise ConfigError(
                f"{error}, or write a list or randint instead of {each.kind} in the search space"
            ) from None


def _check_argument_names(names: Iterable[str]) -> None:
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ConfigError(
                f"{name!r} in the search space cannot be the name of an argument: use letters, digits, '_', '.' and '-'"
            )


def _check_once(settings: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raise ConfigError if two of `names` are the same setting, such as lr and learning_rate."""
    named: dict[str, str] = {}
    for values, name in zip(settings, names, strict=True):
        for setting, value in values.items():
            if not isinstance(value, Mapping) and (other := named.setdefault(setting, name)) != name:
                raise ConfigError(f"{other} and {name} in the search space are the same setting: drop one of them")


def _space_text(path: str) -> Any:
    return parse_yaml(Path(path).read_bytes())


def _work(plan: SweepPlan, on_event: OnEvent) -> None:
    """Run the sweep in the subreaper's child."""
    try:
        engine().run_sweep(plan, lambda line: on_event({"line": json.loads(json.dumps(line, default=str))}))
        on_event({"end": 0})
    except DistributedError as error:
        on_event({"end": error.exit_code, "error": str(error)})
    except BaseException as error:  # the top frame of a process: the parent must receive every error
        lines = [line for line in str(error).splitlines() if line.strip()]
        text = f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")
        on_event({"end": 3, "error": f"the sweep failed ({text}): see {plan.directory / 'search.log'}"})
        raise


@dataclasses.dataclass
class _End:
    """Outcome of a sweep."""

    exit_code: int = 1
    error: str | None = None
    signum: int = 0

    @property
    def status(self) -> str:
        """Status of the run in MLflow."""
        return "KILLED" if self.signum else "FINISHED" if self.exit_code == 0 else "FAILED"


class _SweepWatch:
    """Read the events of the sweep, and pass a stop request on to it."""

    def __init__(
        self,
        plan: SweepPlan,
        sweep: Sweep,
        subreaper: Subreaper,
        signals: Signals,
        table: TrialTable,
        tracked: SweepRun | None,
    ) -> None:
        self._plan, self._sweep, self._subreaper, self._signals, self._table = plan, sweep, subreaper, signals, table
        self._tracked = tracked
        self._end = _End(error=f"the sweep was killed: see {plan.directory / 'search.log'}")
        self._deadline: float | None = None

    def run(self) -> _End:
        with selectors.DefaultSelector() as selector:
            selector.register(self._subreaper.events, selectors.EVENT_READ)
            selector.register(self._signals, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(self._patience())]
                if self._stops(self._signals.read()):
                    return self._end
                if self._subreaper.events in ready and not self._hear():
                    return self._end

    def _patience(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _stops(self, numbers: list[int]) -> bool:
        """Handle signals. Return True if this process is to stop waiting for the sweep."""
        for number in (each for each in numbers if each in STOP_SIGNALS):
            if self._end.signum:
                return True
            self._end.signum = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            if all(record.status != "running" for record in self._sweep.all):  # no trial has anything to save
                return True
            self._deadline = time.monotonic() + _LEAVING_S
            self._plan.stop_file.touch()
            self._table.print_line("stopping: trials save and end; a second Ctrl-C ends them immediately")
        return self._deadline is not None and time.monotonic() > self._deadline

    def _hear(self) -> bool:
        """Handle the events of the sweep. Return False once it has ended."""
        events = self._subreaper.read()
        for event in events or ():
            if "line" in event:
                record_line(self._sweep, event["line"])
                if self._tracked is not None:
                    self._tracked.hear(event["line"])
                self._table.show(event["line"])
            else:
                self._end.exit_code, self._end.error = event["end"], event.get("error")
        return events is not None

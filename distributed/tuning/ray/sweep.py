"""Run a sweep on Ray Tune: start and stop trials as the plan says, and report the events of each trial."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.backends._ray.cluster import check_placement, new_scratch
from distributed.errors import ConfigError, DistributedError, ResourceError, TrainingError
from distributed.launching.engines import seed_python_and_numpy
from distributed.loggers.notebook import in_notebook
from distributed.tuning.earlier import num_begun, primed
from distributed.tuning.plan import SHARING, SweepPlan, check_fits, here, total
from distributed.tuning.ray.cluster import (
    address_of,
    environment,
    has_own_cluster,
    is_connected,
    joined,
    resources,
    with_gpus,
    without_advice,
)
from distributed.tuning.ray.schedulers import make_scheduler
from distributed.tuning.ray.trial import ActorContext, run
from distributed.tuning.sweep import OPEN

__all__ = ["check_here", "has_own_cluster", "new_scratch", "run_sweep"]  # what `distributed.tuning` uses of its engine

# called with lines of the journal: {"trial": 3, "event": "row", "row": {...}}
Listen = Callable[[Mapping[str, Any]], None]
_NUM_EARLY_FAILURES = 3  # number of failed trials after which the sweep ends if no trial has reported anything


def run_sweep(plan: SweepPlan, listen: Listen) -> None:
    """Run the trials of `plan` until they end.

    Args:
        plan: the checked plan of the sweep.
        listen: called with each line of the journal.

    Raises:
        DistributedError: the sweep cannot run, or every trial failed. A stop by the stop file is not an error.
    """
    check_here(plan)
    is_own = has_own_cluster(plan.address)
    with environment(is_own), joined(plan) as ray:
        plan = with_gpus(ray, plan)
        there = resources(ray, plan)
        try:
            _RaySweep(plan, listen, plan.num_live(there, is_own)).run()
        finally:
            shutil.rmtree(plan.directory / ".tune", ignore_errors=True)


def check_here(plan: SweepPlan) -> None:
    """Check what can be known without importing Ray. Raises DistributedError."""
    if importlib.util.find_spec("ray") is None:
        raise ResourceError("a sweep needs ray, which is not installed: run pip install 'distributed-trainer[tune]'")
    address = address_of(plan)
    if address is not None and address.startswith("ray://"):
        raise ConfigError(
            f"address={address!r} is an address of Ray Client, which cannot run a sweep: name the head as HOST:PORT"
        )
    if address is not None:
        check_placement(address, 0, 0)
    elif not is_connected():
        check_fits(total(plan.bundles), here(), "this machine")


class _RaySweep:
    """One run of Ray Tune, and what its callbacks report."""

    def __init__(self, plan: SweepPlan, listen: Listen, num_live: int) -> None:
        self._plan, self._listen, self._num_live = plan, listen, num_live
        self._started: set[int] = set()
        self._ended: set[int] = set()  # trials whose job ended
        self._failures: dict[int, str] = {}  # trial -> its error
        self._judged: set[int] = set()  # trials that had begun when enough trials had failed
        self._num_rows = sum(len(record.rows) for record in plan.earlier)
        self._error: DistributedError | None = None  # the error that ends the whole sweep

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the listener, which may hold threads and files. Ray Tune pickles this object for its own
        restore, which we do not use."""
        return {**self.__dict__, "_listen": None}

    def run(self) -> None:
        with without_advice():
            from ray import tune

        plan = self._plan
        left = plan.num_samples - sum(record.status not in OPEN for record in plan.earlier)
        if left <= 0:
            return
        context = ActorContext(plan, str(Path.cwd()), is_shared=plan.scheduler in SHARING)
        with _own_generators(plan.seed), _without_warnings(), _short_errors():
            tune.Tuner(
                tune.with_resources(_trainable(context), tune.PlacementGroupFactory([dict(each) for each in plan.bundles])),
                tune_config=tune.TuneConfig(
                    num_samples=left, search_alg=_searcher(plan, self._num_live), scheduler=make_scheduler(plan),
                    reuse_actors=True,
                ),
                run_config=tune.RunConfig(
                    name="search", storage_path=str(plan.directory / ".tune"), verbose=0, callbacks=[_listener(self)],
                    stop=_stopper(self), failure_config=tune.FailureConfig(max_failures=plan.max_failures),
                    # Workaround (Ray 2.60, no upstream issue known; may go when it can be told to keep the output): Ray Tune's
                    # reporter for notebooks clears the output of the cell.
                    progress_reporter=tune.CLIReporter() if in_notebook() else None,
                ),
            ).fit()  # fmt: skip
        if self._error is not None:
            raise self._error
        if self._has_failed() and not plan.stop_file.exists():
            raise self._all_failed()

    def _has_failed(self) -> bool:
        """Return True if every trial failed, those of an earlier process included, or if the others reported
        nothing."""
        has_no_results = not self._num_rows and not self._ended
        others = any(record.status not in (*OPEN, "failed") for record in self._plan.earlier)
        return bool(self._failures) and (has_no_results or (self._started <= self._failures.keys() and not others))

    # called by the callbacks of Ray Tune

    def started(self, trial: Any) -> None:
        self._started.add(trial.config["trial"])
        self._pass_on(trial, "started", config=trial.config["values"])

    def result(self, trial: Any, result: Mapping[str, Any]) -> None:
        if result.get("row"):
            self._num_rows += 1
            cloned = {} if result["cloned"] is None else {"cloned": result["cloned"]}
            self._pass_on(trial, "row", row=dict(result["row"]), **cloned)
        if result.get("end"):
            self._ended.add(trial.config["trial"])

    def complete(self, trial: Any) -> None:
        self._pass_on(trial, "ended", status="finished" if trial.config["trial"] in self._ended else "stopped")

    def recovers(self, trial: Any) -> None:
        self._pass_on(trial, "retried", error=self._cause(trial)["error"])

    def failed(self, trial: Any) -> None:
        if self._plan.stop_file.exists():  # the trial ended because of the stop file, before Ray Tune stopped it
            return
        cause = self._cause(trial)
        self._failures.setdefault(trial.config["trial"], cause["error"])
        self._pass_on(trial, "ended", status="failed", error=cause["error"])
        if cause["is_fatal"]:
            self._error = self._error or ConfigError(cause["error"])
        elif self._has_failed_early():
            self._error = self._error or self._all_failed()

    def _has_failed_early(self) -> bool:
        """Return True if the sweep is to end because no trial has worked.

        This is so if no trial has reported a metric or finished, at least `_NUM_EARLY_FAILURES` trials have failed, and every
        trial that had started when this number was reached has failed too.
        """
        if len(self._failures) < _NUM_EARLY_FAILURES or self._num_rows or self._ended:
            return False
        self._judged = self._judged or set(self._started)
        return self._judged <= self._failures.keys()

    def is_over(self) -> bool:
        """Return True if all trials are to stop now."""
        return self._error is not None or self._plan.stop_file.exists()

    def _pass_on(self, trial: Any, event: str, **detail: Any) -> None:
        if trial.config["trial"] not in self._started:  # the actor of the trial did not start
            self.started(trial)
        self._listen({"trial": trial.config["trial"], "event": event, **detail})

    def _cause(self, trial: Any) -> dict[str, Any]:
        """Return the error that the trial wrote, or a general one if its process died before it could write."""
        file = self._plan.directory / "trials" / f"{trial.config['trial']:05d}.error.json"
        with contextlib.suppress(OSError, ValueError):
            content: dict[str, Any] = json.loads(file.read_text())
            return content
        died = "the process of the trial died: it was killed, ran out of memory, or crashed outside of Python"
        return {"error": died, "is_fatal": False}

    def _all_failed(self) -> TrainingError:
        several = len(self._failures) > 1
        which = f"all {len(self._failures)} trials" if several else "the trial"
        when = "" if self._num_rows or self._ended else " before any metric"
        return TrainingError(
            f"{which} failed{when}: {next(iter(self._failures.values()))} ({self._plan.directory / 'trials'} has the logs)"
        )


@contextlib.contextmanager
def _own_generators(seed: int) -> Iterator[None]:
    """Seed the generators of the process, from which schedulers draw, and restore them afterwards."""
    import numpy

    python, arrays = random.getstate(), numpy.random.get_state()
    seed_python_and_numpy(seed, seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)


@contextlib.contextmanager
def _short_errors() -> Iterator[None]:
    """Replace the report about a function that cannot be pickled by an error of one line.

    Workaround (Ray 2.60, ray-project/ray#31070; may go when the error names the reason alone): Ray raises a report of many lines.
    """
    try:
        yield
    except TypeError as error:
        reason = re.search(r"FAIL\S* serialization: (.+)", str(error))
        if reason is None:
            raise
        raise ConfigError(
            f"train_fn cannot be sent to the processes of its trials ({reason[1]}): create the objects that it uses inside the function"
        ) from None


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the warnings of Ray Tune.

    Workaround (Ray 2.60, no upstream issue known; may go when a setting turns these warnings off): Ray Tune warns about the missing
    files of its own loggers, and about failures, which are in our logs.
    """
    logger = logging.getLogger("ray.tune")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _trainable(context: ActorContext) -> Callable[[dict[str, Any]], None]:
    def trial(config: dict[str, Any]) -> None:
        run(context, config)

    return trial


def _searcher(plan: SweepPlan, num_live: int) -> Any:
    """Return the search algorithm of `plan` as a searcher of Ray Tune."""
    from ray.tune.search import Searcher

    class OurSearcher(Searcher):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._proposals, self._waiting = primed(plan)
            self._numbers = iter(range(num_begun(plan), plan.num_samples))
            self._live: dict[str, tuple[Mapping[str, Any], list[float]]] = {}

        def suggest(self, trial_id: str) -> Any:
            if len(self._live) >= num_live and plan.scheduler not in SHARING:
                return None
            if self._waiting:
                number, values = self._waiting.pop(0)
            else:
                number, values = next(self._numbers), self._proposals.ask()
            self._live[trial_id] = (values, [])
            return {"trial": number, "values": dict(values)}

        def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
            if "score" in result:
                self._live[trial_id][1].append(result["score"])

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            values, scores = self._live.pop(trial_id)
            scores += [result["score"]] if result and "score" in result else []
            self._proposals.tell(values, min(scores, default=float("inf")))

        def save(self, checkpoint_path: str) -> None:
            """Do nothing: the journal has everything that a resume needs."""

        def restore(self, checkpoint_path: str) -> None:
            """Do nothing, as in `save`."""

        def save_to_dir(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing, as in `save`."""

    return OurSearcher()


def _listener(made: _RaySweep) -> Any:
    """Return a callback of Ray Tune that passes the events of trials on to `made`."""
    from ray import tune

    class Listener(tune.Callback):  # type: ignore[misc]
        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            made.started(trial)

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            made.result(trial, result)

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            made.complete(trial)

        def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            made.recovers(trial)

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            made.failed(trial)

    return Listener()


def _stopper(made: _RaySweep) -> Any:
    """Return a stopper of Ray Tune that stops all trials when `made` is over."""
    from ray import tune

    class Stopper(tune.Stopper):  # type: ignore[misc]
        def __call__(self, trial_id: str, result: Any) -> bool:
            return False

        def stop_all(self) -> bool:
            return made.is_over()

    return Stopper()

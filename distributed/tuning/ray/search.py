"""Running a search on Ray Tune: start and stop trials as the plan says, and report the events of each trial."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.backends._ray.cluster import (
    LOCAL_OBJECT_STORE_BYTES,
    check_placement,
    new_scratch,
    own_token,
    start_own,
)
from distributed.backends._ray.joining import join
from distributed.config.registry import import_library
from distributed.errors import ConfigError, DistributedError, ResourceError, TrainingError
from distributed.loggers.notebook import in_notebook
from distributed.tuning.earlier import num_begun, primed
from distributed.tuning.plan import SHARING, SearchPlan, check_fits, here, total
from distributed.tuning.ray.schedulers import STOPPING_S, make_scheduler
from distributed.tuning.ray.trial import Order, run
from distributed.tuning.sweep import OPEN

# called with lines of the journal: {"trial": 3, "event": "row", "row": {...}}
Listen = Callable[[Mapping[str, Any]], None]
_HOPELESS = 3  # number of failed trials after which the search ends if no trial has reported anything
_QUIET = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}


def search(plan: SearchPlan, listen: Listen) -> None:
    """Run the trials of `plan` until they end.

    Args:
        plan: the checked plan of the search.
        listen: called with each line of the journal.

    Raises:
        DistributedError: the search cannot run, or every trial failed. A stop by the stop file is no error.
    """
    check_here(plan)
    is_own = has_own_cluster(plan.address)
    with _environment(is_own), _joined(plan) as ray:
        plan = _with_gpus(ray, plan)
        there = _resources(ray, plan)
        try:
            _Search(plan, listen, plan.num_live(there, is_own)).run()
        finally:
            shutil.rmtree(plan.directory / ".tune", ignore_errors=True)


def check_here(plan: SearchPlan) -> None:
    """Check what can be known without importing Ray. Raises DistributedError."""
    if importlib.util.find_spec("ray") is None:
        raise ResourceError("a search needs ray, which is not installed: run pip install 'distributed-trainer[tune]'")
    address = _address(plan)
    if address is not None and address.startswith("ray://"):
        raise ConfigError(
            f"address={address!r} is of Ray's client, which cannot run a search: name the head as HOST:PORT"
        )
    if address is not None:
        check_placement(address, 0, 0)
    elif not _is_connected():
        check_fits(total(plan.bundles), here(), "this machine")


def has_own_cluster(address: str | None) -> bool:
    """Return True if a search with this `address` would start its own cluster, because there is none to join."""
    return _named(address) is None and not _is_connected()


def _address(plan: SearchPlan) -> str | None:
    return _named(plan.address)


def _named(address: str | None) -> str | None:
    chosen = address or os.environ.get("RAY_ADDRESS") or None
    return None if chosen == "local" else chosen


def _is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


# ------------------------------------------------------------------ the cluster


@contextlib.contextmanager
def _environment(is_own: bool) -> Iterator[None]:
    """Set the variables that Ray reads at import, for this process and for its own cluster. Restore them afterwards."""
    before = dict(os.environ)
    os.environ.update({
        "RAY_AIR_NEW_OUTPUT": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1", "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_FORCE_TRIAL_CLEANUP_S": str(STOPPING_S), "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    })  # fmt: skip
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_own:
        os.environ.update(own_token())
        _read_token_again()
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        if is_own:
            _read_token_again()


def _read_token_again() -> None:
    """Make Ray read its authentication mode and token again.

    Ray 2.60 caches the mode at import and the token at the first connection. The two calls are in the order of
    ray/_private/authentication_test_utils.py: a thread that is still ending may read the token between them. This can
    go when `ray.init` takes the token as an argument.
    """
    if "ray" in sys.modules:
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _joined(plan: SearchPlan) -> Iterator[Any]:
    """Yield Ray, connected to the cluster of this process, to the cluster at the plan's address, or to its own new
    cluster."""
    with _without_advice():
        ray = import_library("ray", "ray")
    if ray.is_initialized():
        yield ray
        return
    scratch: Path | None = None
    # Ray replaces the handler of SIGTERM by its own, which ends the process at once.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if (address := _address(plan)) is not None:
            join(ray, address, **_QUIET)
        else:
            scratch = plan.scratch or new_scratch()
            start_own(ray, scratch, _own_cpus(plan), LOCAL_OBJECT_STORE_BYTES, **_QUIET)
        if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
        yield ray
    finally:
        ray.shutdown()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _own_cpus(plan: SearchPlan) -> int:
    """Return the CPUs of the search's own cluster: no more than the trials that may run at once need."""
    there, cpus = int(here()["CPU"]), total(plan.bundles).get("CPU", 0.0)
    return min(there, math.ceil(cpus * plan.max_concurrent)) if cpus and plan.max_concurrent else there


def _with_gpus(ray: Any, plan: SearchPlan) -> SearchPlan:
    """Return `plan` with a share of the GPUs for each trial if the cluster has GPUs and the user did not say how
    many."""
    if not plan.gpus_if_any or not ray.cluster_resources().get("GPU"):
        return plan
    first, *others = plan.bundles
    return dataclasses.replace(plan, bundles=({**first, "GPU": plan.gpus_if_any}, *others))


def _resources(ray: Any, plan: SearchPlan) -> dict[str, float]:
    """Return the resources of the cluster. Raises ResourceError if a bundle fits on no node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for bundle in plan.bundles:
        largest = max(nodes, key=lambda node: min(node.get(name, 0.0) - amount for name, amount in bundle.items()))
        check_fits(bundle, largest, "the largest node of the cluster")
    return {name: float(amount) for name, amount in ray.cluster_resources().items()}


# ------------------------------------------------------------------ the search


class _Search:
    """One run of Ray Tune, and what its callbacks report."""

    def __init__(self, plan: SearchPlan, listen: Listen, num_live: int) -> None:
        self._plan, self._listen, self._num_live = plan, listen, num_live
        self._started: set[int] = set()
        self._ended: set[int] = set()  # trials whose job ended
        self._failures: dict[int, str] = {}  # trial -> its error
        self._judged: set[int] = set()  # trials that had begun when enough trials had failed
        self._num_rows = sum(len(record.rows) for record in plan.earlier)
        self._error: DistributedError | None = None  # the error that ends the whole search

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the listener, which may hold threads and files. Ray Tune pickles this object for its own
        restore, which we do not use."""
        return {**self.__dict__, "_listen": None}

    def run(self) -> None:
        with _without_advice():
            from ray import tune

        plan = self._plan
        left = plan.num_samples - sum(record.status not in OPEN for record in plan.earlier)
        if left <= 0:
            return
        order = Order(plan, str(Path.cwd()), is_shared=plan.scheduler in SHARING)
        with _own_generators(plan.seed), _without_warnings(), _said_shortly():
            tune.Tuner(
                tune.with_resources(_trainable(order), tune.PlacementGroupFactory([dict(each) for each in plan.bundles])),
                tune_config=tune.TuneConfig(
                    num_samples=left, search_alg=_searcher(plan, self._num_live), scheduler=make_scheduler(plan),
                    reuse_actors=True,
                ),
                run_config=tune.RunConfig(
                    name="search", storage_path=str(plan.directory / ".tune"), verbose=0, callbacks=[_listener(self)],
                    stop=_stopper(self), failure_config=tune.FailureConfig(max_failures=plan.max_failures),
                    # Ray Tune's own reporter clears the output of the cell
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
        is_mute = not self._num_rows and not self._ended
        others = any(record.status not in (*OPEN, "failed") for record in self._plan.earlier)
        return bool(self._failures) and (is_mute or (self._started <= self._failures.keys() and not others))

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
        if self._plan.stop_file.exists():  # it left because of the stop file, before Ray Tune stopped it
            return
        cause = self._cause(trial)
        self._failures.setdefault(trial.config["trial"], cause["error"])
        self._pass_on(trial, "ended", status="failed", error=cause["error"])
        if cause["is_fatal"]:
            self._error = self._error or ConfigError(cause["error"])
        elif self._is_hopeless():
            self._error = self._error or self._all_failed()

    def _is_hopeless(self) -> bool:
        """Return True if enough trials failed, no other trial reported anything, and every trial that had begun
        before has failed."""
        if len(self._failures) < _HOPELESS or self._num_rows or self._ended:
            return False
        self._judged = self._judged or set(self._started)
        return self._judged <= self._failures.keys()

    def is_over(self) -> bool:
        """Return True if all trials are to stop now."""
        return self._error is not None or self._plan.stop_file.exists()

    def _pass_on(self, trial: Any, event: str, **detail: Any) -> None:
        if trial.config["trial"] not in self._started:  # its actor did not start
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
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)


@contextlib.contextmanager
def _said_shortly() -> Iterator[None]:
    """Replace Ray's long report of a function that cannot be pickled by an error of one line."""
    try:
        yield
    except TypeError as error:
        reason = re.search(r"FAIL\S* serialization: (.+)", str(error))
        if reason is None:
            raise
        raise ConfigError(
            f"train_fn cannot be sent to the processes of its trials ({reason[1]}): make what it holds inside of it"
        ) from None


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence Ray Tune's warnings about the missing files of its own loggers and about failures, which our logs
    contain."""
    logger = logging.getLogger("ray.tune")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Silence Ray's advice to install notebook widgets during its import. We do not use them."""
    advisor = logging.getLogger("ray.widgets")
    before = advisor.level
    advisor.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")  # tqdm issues this warning
            yield
    finally:
        advisor.setLevel(before)


def _trainable(order: Order) -> Callable[[dict[str, Any]], None]:
    def trial(config: dict[str, Any]) -> None:
        run(order, config)

    return trial


def _searcher(plan: SearchPlan, num_live: int) -> Any:
    """Return our proposals as a searcher of Ray Tune."""
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
            """Do nothing: the journal has all."""

        def restore(self, checkpoint_path: str) -> None:
            """Do nothing: the journal has all."""

        def save_to_dir(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing: the journal has all."""

    return OurSearcher()


def _listener(made: _Search) -> Any:
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


def _stopper(made: _Search) -> Any:
    from ray import tune

    class Stopper(tune.Stopper):  # type: ignore[misc]
        def __call__(self, trial_id: str, result: Any) -> bool:
            return False

        def stop_all(self) -> bool:
            return made.is_over()

    return Stopper()

"""Search algorithms: `ask` proposes the values of the next trial, and `tell` receives its score. A smaller score is
better.

Workaround (Ray 2.60, no upstream issue known; the part for Optuna may go when Ray Tune's `OptunaSearch` tells the best value of a
trial and is restored without a pickle): `OptunaSearch` tells Optuna the last value of a trial, and Ray reads a pickle to restore a
sweep. Here a sweep that is resumed replays its journal.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
from collections.abc import Mapping
from typing import Any, Protocol

from distributed.errors import ConfigError, ResourceError, nearest
from distributed.tuning.space import Dimension, Space, constants, draw, size_of_grid, varied

SEARCH_ALGORITHMS = ("random", "grid", "optuna", "bayesopt")
_NEEDED = {"optuna": "optuna", "bayesopt": "bayes_opt"}
_FIRST_AT_RANDOM = 5  # random trials before the Gaussian process is fitted


class Proposals(Protocol):
    """Interface of every search algorithm."""

    def ask(self) -> dict[str, Any]:
        """Return the values of the next trial."""

    def tell(self, values: Mapping[str, Any], score: float) -> None:
        """Learn from the score of values that `ask` returned."""

    def repeat(self, values: Mapping[str, Any], score: float | None) -> None:
        """Replay a proposal of an earlier process. `score` is None if its trial had not ended."""


def check_search(search: str, space: Space, num_samples: int | None) -> int:
    """Return the number of trials.

    Raises:
        ConfigError: the search algorithm is not known, or does not fit the space or the number of trials.
        ResourceError: a library is not installed.
    """
    if search not in SEARCH_ALGORITHMS:
        raise ConfigError(
            f"search={search!r} is not known{nearest(search, SEARCH_ALGORITHMS)}: choose one of {', '.join(SEARCH_ALGORITHMS)}"
        )
    if num_samples is not None and (
        isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1
    ):
        raise ConfigError(f"num_samples={num_samples!r} is not a number of trials: set 1 or more")
    if search == "grid":
        return _check_grid(space, num_samples)
    if num_samples is None:
        raise ConfigError(f"search={search!r} does not end by itself: set num_samples, the number of trials")
    if (module := _NEEDED.get(search)) and importlib.util.find_spec(module) is None:
        raise ResourceError(
            f"search={search!r} needs {module}, which is not installed: run pip install 'distributed-trainer[tune]'"
        )
    unknown = [name for name, each in space.items() if each.kind == "sampler"]
    if module and unknown:
        raise ConfigError(
            f"search={search!r} does not know the domain of {unknown[0]}: write it as uniform, loguniform, randint or choice"
        )
    return num_samples


def _check_grid(space: Space, num_samples: int | None) -> int:
    size = size_of_grid(space)
    if size is None:
        endless = next(name for name, each in space.items() if each.grid() is None)
        raise ConfigError(f"search='grid' cannot list the values of {endless}: write a list, or choose search='random'")
    if num_samples not in (None, size):
        raise ConfigError(
            f"num_samples={num_samples} is not the {size} combinations of search='grid': drop it, or choose search='random'"
        )
    return size


def make_proposals(search: str, space: Space, seed: int) -> Proposals:
    """Return the search algorithm of that name. Given the same seed and the same scores it proposes the same values."""
    if search == "grid":
        return _Grid(space)
    if search == "optuna":
        return _Optuna(space, seed)
    return _BayesOpt(space, seed) if search == "bayesopt" else _Random(space, seed)


class _Random:
    def __init__(self, space: Space, seed: int) -> None:
        self._space, self._state = space, _random_state(seed)

    def ask(self) -> dict[str, Any]:
        return draw(self._space, self._state)

    def tell(self, values: Mapping[str, Any], score: float) -> None:
        """Ignore the score: random proposals do not learn."""

    def repeat(self, values: Mapping[str, Any], score: float | None) -> None:
        self.ask()


class _Grid:
    """Every combination once. The last name changes fastest."""

    def __init__(self, space: Space) -> None:
        self._names = list(space)
        self._rest = itertools.product(*(each.grid() or () for each in space.values()))

    def ask(self) -> dict[str, Any]:
        return dict(zip(self._names, next(self._rest), strict=True))

    def tell(self, values: Mapping[str, Any], score: float) -> None:
        """Ignore the score: all combinations run."""

    def repeat(self, values: Mapping[str, Any], score: float | None) -> None:
        self.ask()


class _Optuna:
    """Optuna's tree-structured Parzen estimator (Bergstra et al., 2011)."""

    def __init__(self, space: Space, seed: int) -> None:
        import optuna

        self._optuna, self._constants = optuna, constants(space)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._distributions = {name: _distribution(optuna, each) for name, each in varied(space).items()}
        # Count running trials as bad ones (constant_liar). Otherwise concurrent trials would try similar values.
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self._study = optuna.create_study(direction="minimize", sampler=sampler)
        self._running: list[tuple[dict[str, Any], Any]] = []

    def ask(self) -> dict[str, Any]:
        trial = self._study.ask(self._distributions)
        self._running.append((dict(trial.params), trial))
        return {**self._constants, **trial.params}

    def tell(self, values: Mapping[str, Any], score: float) -> None:
        params = {name: values[name] for name in self._distributions}
        own = next((pair for pair in self._running if pair[0] == params), None)
        states = self._optuna.trial.TrialState
        is_number = math.isfinite(score)
        if own is not None:
            self._running.remove(own)
            self._study.tell(own[1], score if is_number else None, state=None if is_number else states.FAIL)
        elif is_number:  # an earlier process proposed the values
            self._add(params, score)

    def repeat(self, values: Mapping[str, Any], score: float | None) -> None:
        # Draw a proposal and discard it. Otherwise the same seed would begin with the same proposals again.
        self._study.tell(self._study.ask(self._distributions), state=self._optuna.trial.TrialState.FAIL)
        if score is not None and math.isfinite(score):
            self._add({name: values[name] for name in self._distributions}, score)

    def _add(self, params: dict[str, Any], score: float) -> None:
        done = self._optuna.trial.create_trial(params=params, distributions=self._distributions, value=score)
        self._study.add_trial(done)


def _distribution(optuna: Any, each: Dimension) -> Any:
    if each.kind == "choice":
        return optuna.distributions.CategoricalDistribution(each.values)
    if each.kind == "randint":
        return optuna.distributions.IntDistribution(int(each.low), int(each.high) - 1)
    return optuna.distributions.FloatDistribution(each.low, each.high, log=each.kind == "loguniform")


class _BayesOpt:
    """A Gaussian process over the unit cube (bayesian-optimization), after a few random trials."""

    def __init__(self, space: Space, seed: int) -> None:
        from bayes_opt import BayesianOptimization

        self._constants, self._varied = constants(space), varied(space)
        bounds = dict.fromkeys(self._varied, (0.0, 1.0))
        self._state = _random_state(seed)
        self._optimizer = BayesianOptimization(None, bounds, random_state=seed % 2**32, verbose=0)
        self._asked = self._told = 0

    def ask(self) -> dict[str, Any]:
        self._asked += 1
        if self._asked <= _FIRST_AT_RANDOM or self._told == 0:
            return self._constants | draw(self._varied, self._state)
        point = self._optimizer.suggest()
        return self._constants | {name: each.at(float(point[name])) for name, each in self._varied.items()}

    def tell(self, values: Mapping[str, Any], score: float) -> None:
        if not math.isfinite(score):
            return
        from bayes_opt.exception import NotUniqueError

        self._told += 1
        point = {name: min(1.0, max(0.0, each.unit(values[name]))) for name, each in self._varied.items()}
        with contextlib.suppress(NotUniqueError):  # the point has been registered before
            self._optimizer.register(point, -score)

    def repeat(self, values: Mapping[str, Any], score: float | None) -> None:
        self._asked += 1
        if self._asked <= _FIRST_AT_RANDOM:
            draw(self._varied, self._state)
        if score is not None:
            self.tell(values, score)


def _random_state(seed: int) -> Any:
    import numpy

    return numpy.random.RandomState(seed % 2**32)

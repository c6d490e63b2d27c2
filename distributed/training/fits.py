"""Run each fit of a Trainer in this process or in workers, and keep the result of the last fit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.backends import entry_in_use, make_backend
from distributed.backends.base import Backend
from distributed.config.merging import MergedConfig, for_evaluation
from distributed.config.plan import ProcessPlan
from distributed.errors import ConfigError
from distributed.launching.causes import location_of_caller
from distributed.launching.request import is_loading
from distributed.training.capture import offer
from distributed.training.setup import Setup

if TYPE_CHECKING:
    from distributed.runs.history import History
    from distributed.training.remote import Remote
    from distributed.training.session import FitSession


class Fits:
    """Train `setup` in this process, or in workers that are started for it. Every rank calls every method.

    `trainer_class` is the class whose `fit` the workers call. `run_dir` is the run directory of a fit in workers, or None if the fit
    is to choose it.
    """

    def __init__(self, setup: Setup, trainer_class: type[Any], run_dir: Path | None = None) -> None:
        self.setup, self.trainer_class, self.run_dir = setup, trainer_class, run_dir
        self.history: History | None = None  # of the last fit
        self.remote: Remote | None = None  # result of the last fit in workers
        self._session: FitSession | None = None  # created by the first fit or evaluation in this process

    @property
    def is_used(self) -> bool:
        """Return whether training or evaluation has begun."""
        return self._session is not None or self.remote is not None

    @property
    def merged(self) -> MergedConfig:
        """The settings of the newest fit in this process, or those of `setup` before it."""
        return self.setup.merged if self._session is None else self._session.merged

    @property
    def backend(self) -> Backend[Any]:
        """The adapter that trains or evaluates in this process. Before training and evaluation it is that of `setup`."""
        return self.setup.backend if self._session is None else self._session.backend

    def fit(self, settings: Mapping[str, Any], train_data: Any, val_data: Any = None) -> History:
        """Train the model and return the history, as `Trainer.fit` does. `settings` are the settings given to this fit."""
        if is_loading():
            raise ConfigError(
                f"{location_of_caller(sys._getframe())}, calls fit() while a worker imports this module to load its classes: put that call"
                " under if __name__ == '__main__', or the classes into a module of their own"
            )
        offer(self, train_data)
        if not self.setup.is_fit_in_workers:
            self.history = self.open_session().fit(settings, train_data, val_data)
            return self.history
        from distributed.training.remote import fit_in_workers

        self.history = fit_in_workers(self, settings, train_data, val_data)
        return self.history

    def open_session(self) -> FitSession:
        """Return the session of this process. The first call joins the other ranks."""
        from distributed.training.session import FitSession

        setup = self.setup
        if self._session is None:
            backend = setup.backend
            if setup.is_fit_in_workers:  # evaluate, predict and save then run in this single process
                alone = entry_in_use(setup.merged.config, setup.plan.backend).alone
                backend = make_backend(for_evaluation(setup.merged), ProcessPlan(1, 1, setup.plan.device, alone))
            self._session = FitSession(setup, backend)
        return self._session

    def take_back(self, model: Any, history: History, remote: Remote | None = None) -> None:
        """Continue from the result of a fit elsewhere. Later evaluations and predictions use the weights of `model`."""
        job = self.setup.job
        job.model, job.init_from = model, None
        self.history, self.remote, self._session = history, remote, None

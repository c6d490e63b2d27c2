"""Run each fit of a Trainer in this process or in workers, and keep what the last one left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.backends import make_backend
from distributed.backends.base import Backend
from distributed.config.merging import MergedConfig, for_evaluation
from distributed.config.plan import ProcessPlan
from distributed.config.registry import row_in_use
from distributed.loggers import registry as loggers
from distributed.training.setup import Setup

if TYPE_CHECKING:
    from distributed.runs.history import History
    from distributed.training.remote import Remote
    from distributed.training.session import Session


class Fits:
    """Train `setup` in this process, or in workers that are started for it. Every rank calls every method.

    `trainer_class` is the class whose `fit` the workers call.
    """

    def __init__(self, setup: Setup, trainer_class: type[Any]) -> None:
        self.setup, self.trainer_class = setup, trainer_class
        self.remote: Remote | None = None  # result of the last fit in workers
        self._session: Session | None = None  # made by the first fit or evaluation in this process

    @property
    def is_used(self) -> bool:
        """Whether training or evaluation has begun."""
        return self._session is not None or self.remote is not None

    @property
    def backend(self) -> Backend[Any]:
        """The adapter that trains or evaluates in this process, or the one of `setup` before it does either."""
        return self.setup.backend if self._session is None else self._session.backend

    def fit(self, merged: MergedConfig, train_data: Any, val_data: Any = None) -> History:
        """Train the model and return the history, as `Trainer.fit` does."""
        loggers.check_directories(merged)
        if not self.setup.is_fit_in_workers:
            return self.open_session().fit(merged, train_data, val_data)
        from distributed.training.remote import fit_in_workers

        return fit_in_workers(self, merged, train_data, val_data)

    def open_session(self) -> Session:
        """Return the session of this process. The first call joins the other ranks."""
        from distributed.training.session import Session

        setup = self.setup
        if self._session is None:
            backend = setup.backend
            if setup.is_fit_in_workers:  # evaluate, predict and save run in this process alone
                alone = row_in_use(setup.merged.config, setup.plan.backend).alone
                backend = make_backend(for_evaluation(setup.merged), ProcessPlan(1, 1, setup.plan.device, alone))
            self._session = Session(setup, backend)
        return self._session

    def take_back(self, remote: Remote, model: Any) -> None:
        """Continue from the result of a fit in workers. Later evaluations and predictions use the weights of `model`."""
        self.setup.job.model, self.remote, self._session = model, remote, None

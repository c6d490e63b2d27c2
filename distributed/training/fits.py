"""The fits of one Trainer: where each runs, and what the last one left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.backends import make_backend
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
    """Trains `setup` in this process, or in workers that are started for it. Every rank calls every method.

    `trainer_class` is the class whose `fit` the workers call.
    """

    def __init__(self, setup: Setup, trainer_class: type[Any]) -> None:
        self.setup, self.trainer_class = setup, trainer_class
        self.remote: Remote | None = None  # what the last fit in workers left
        self._session: Session | None = None  # of this process, made by the first fit or evaluate

    @property
    def is_used(self) -> bool:
        """Whether it has trained or evaluated already, or has begun to."""
        return self._session is not None or self.remote is not None

    def fit(self, merged: MergedConfig, train_data: Any, val_data: Any = None) -> History:
        """Train as `Trainer.fit` says."""
        loggers.check_directories(merged)
        if not self.setup.is_fit_in_workers:
            return self.open_session().fit(merged, train_data, val_data)
        from distributed.training.remote import fit_in_workers

        return fit_in_workers(self, merged, train_data, val_data)

    def open_session(self) -> Session:
        """Return the session of this process; the first call joins the others."""
        from distributed.training.session import Session

        setup = self.setup
        if self._session is None:
            if setup.is_fit_in_workers:  # evaluate, predict, save beside it
                alone = row_in_use(setup.merged.config, setup.plan.backend).alone
                setup.backend = make_backend(for_evaluation(setup.merged), ProcessPlan(1, 1, setup.plan.device, alone))
            self._session = Session(setup)
        return self._session

    def take_back(self, remote: Remote, model: Any) -> None:
        """Go on from what a fit in workers left: evaluate and predict start from the weights of `model`."""
        self.setup.job.model, self.remote, self._session = model, remote, None

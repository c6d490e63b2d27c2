"""Find a learning rate: a short fit on a copy, in which a warm-up raises the rate over the whole range."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import math
import numbers
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.callbacks import Callback
from distributed.checkpoints.durable import replace_text
from distributed.config.kinds import NUMBER, check_kinds, list_of
from distributed.config.reading import MAX_JSON_BYTES, parse_json, read_bytes
from distributed.errors import ConfigError
from distributed.finders.curve import Divergence, LearningRateCurve
from distributed.finders.setups import check_unused, finder_setup
from distributed.runs.directory import LEARNING_RATE
from distributed.state import Job
from distributed.training.files import is_trial_again
from distributed.training.fit_request import FitRequest
from distributed.training.fits import Fits
from distributed.training.setup import Setup

if TYPE_CHECKING:
    from distributed.state import TrainState

_LEAST_STEPS = 20
_DIVERGED = "diverged"
_FILE = "curve.json"
# What the fit does besides training. Its checkpoints serve a restart, and bring the losses back from workers.
_REQUEST = FitRequest(
    is_shown=False, reports_epochs=False, is_resumable=False, explains_out_of_memory=False, directory_name=LEARNING_RATE
)


@dataclasses.dataclass(frozen=True)
class RateRange:
    """The range of rates to try, and the number of updates."""

    min_rate: float
    max_rate: float
    num_steps: int

    def checked(self) -> RateRange:
        """Return the range with Python's own numbers. Raises ConfigError if it is not a valid range."""
        for name in ("min_rate", "max_rate"):
            if not _is_number(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r} is not a rate: give a number above 0, such as 1e-7")
        if self.min_rate >= self.max_rate:
            raise ConfigError(f"min_rate={self.min_rate:g} is not below max_rate={self.max_rate:g}: lower min_rate")
        if not isinstance(self.num_steps, numbers.Integral) or self.num_steps < _LEAST_STEPS:
            raise ConfigError(
                f"num_steps={self.num_steps!r} is too few for a curve: give a whole number, at least {_LEAST_STEPS}"
            )
        return RateRange(float(self.min_rate), float(self.max_rate), int(self.num_steps))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the fit that tries the rates. Its last update is the first one after the warm-up."""
        return {
            "learning_rate": self.max_rate, "warmup_start": self.min_rate / self.max_rate, "warmup_steps": self.num_steps - 1,
            "max_steps": self.num_steps, "epochs": self.num_steps, "nan_policy": "skip", "checkpoint_frequency": None,
            "log_every_n_steps": 1, "verbose": False,
        }  # fmt: skip

    def curve(self, losses: list[float]) -> LearningRateCurve:
        """Return the curve of `losses`, those of the first updates."""
        ratio = self.min_rate / self.max_rate
        rates = [self.max_rate * ratio ** (1 - i / (self.num_steps - 1)) for i in range(len(losses))]
        return LearningRateCurve(rates, losses, self.num_steps)


class LossRecorder(Callback):
    """Record the loss of each update, and stop the fit when it diverges."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._divergence = Divergence()
        self._is_over = False

    def on_train_start(self, state: TrainState) -> None:
        if self._is_over:  # the loss had diverged before a restart
            self.context.stop(_DIVERGED)

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        loss = metrics["loss"]
        if math.isfinite(loss):
            self.losses.append(loss)
        if self._divergence.add(loss):
            self._is_over = True
            self.context.stop(_DIVERGED)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "is_over": self._is_over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses, self._is_over = list(state["losses"]), state["is_over"]


def find_learning_rate(fits: Fits, train_data: Any, rates: RateRange) -> LearningRateCurve:
    """Return the curve, see `Trainer.find_learning_rate`. All ranks call it."""
    rates = rates.checked()
    check_unused(fits, "find_learning_rate()")
    if isinstance(fits.setup.merged.config.resume_from_checkpoint, str):
        raise ConfigError(
            f"resume_from_checkpoint={fits.setup.merged.config.resume_from_checkpoint!r} gives fit() other weights than"
            " find_learning_rate() starts from: find the rate without it, with a model that has those weights"
        )
    try:
        return rates.curve(_losses(fits, train_data, rates))
    finally:
        gc.collect()  # reference cycles hold the copy of the model, and the next fit needs its memory


def _losses(fits: Fits, train_data: Any, rates: RateRange) -> list[float]:
    """Return the losses of the finder, from the files of an earlier attempt or by training a copy of the model."""
    recorder = LossRecorder()
    job = _copied_job(fits.setup.job)
    setup = finder_setup(fits.setup, _REQUEST, rates.settings, job=job, callbacks=[recorder])
    run_dir = None
    if setup.is_fit_in_workers:
        from distributed.training.remote import take_dir

        run_dir = take_dir(setup.request)
    finder = Fits(setup, fits.trainer_class, run_dir)
    directory, on_main, goes_on = _directory_of(finder, fits.setup)
    losses: list[float] | None = on_main(lambda: _begin(directory, rates, goes_on=goes_on))
    if losses is None:
        finder.fit({}, train_data)
        losses = recorder.losses
        on_main(lambda: _finish(directory, rates, recorder.losses))
    return losses


def _directory_of(finder: Fits, setup: Setup) -> tuple[Path, Callable[[Callable[[], Any]], Any], bool]:
    """Return the directory of the finder and who writes it.

    Returns:
        The directory of the finder, a function that runs an action on the main process alone, and whether this repeats
        an earlier attempt.
    """
    if finder.run_dir is not None:
        return finder.run_dir, lambda action: action(), is_trial_again()
    files = finder.open_session().files
    return files.directory, files.on_main, files.wants_resume(setup.merged)


def _begin(directory: Path, rates: RateRange, *, goes_on: bool) -> list[float] | None:
    """Return the losses of an earlier attempt with the same range. Otherwise return None.

    The files of an attempt that did not finish are deleted. Called on the main process.
    """
    if goes_on:
        try:
            kept = parse_json(read_bytes(directory / _FILE, MAX_JSON_BYTES))
            check_kinds(kept, {"losses": list_of(NUMBER)})
        except (OSError, ValueError):
            kept = {}
        if kept.get("request") == dataclasses.asdict(rates) and "losses" in kept:
            losses: list[float] = kept["losses"]
            return losses
    if (directory / "config.yaml").exists():  # left by an attempt that did not finish
        shutil.rmtree(directory)
    return None


def _finish(directory: Path, rates: RateRange, losses: list[float]) -> None:
    """Save the curve, and delete the weights of the copy. Called on the main process."""
    replace_text(directory / _FILE, json.dumps({"request": dataclasses.asdict(rates), "losses": losses}))
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)


def _copied_job(job: Job) -> Job:
    """Return a copy of the job without its scheduler. Model, optimizer, loss and metrics of the copy belong together.

    If the model is given as a factory, the finder and the fit that follows each call the factory.
    """
    from distributed.backends.keras_pickling import remade

    memo: dict[int, Any] = {}
    # Workaround (Keras 3.15, no upstream issue known; may go when Keras draws its seeds from a generator of its own): a new layer
    # draws from Python's generator.
    drawn = random.getstate()
    try:
        for part in (job.model, job.optimizer, job.loss_fn, *job.metrics.values()):
            if (again := remade(part)) is not None:
                memo[id(part)] = again
        return copy.deepcopy(dataclasses.replace(job, scheduler=None), memo)
    except (TypeError, RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the model cannot be copied for the finder ({reason}): pass a function that makes it, Trainer(make_model), and a"
            " factory of the optimizer"
        ) from error
    finally:
        random.setstate(drawn)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < float(value) < math.inf

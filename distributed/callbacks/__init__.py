"""Callbacks, a user's hooks into the training loop on every rank, and those that the package ships; what records a run belongs in `loggers`."""

from distributed.callbacks.averaging import ExponentialMovingAverage, WeightAveraging
from distributed.callbacks.base import AVERAGED_WEIGHTS, GRADIENTS, AveragedWeights, Callback, FitContext
from distributed.callbacks.early_stopping import EarlyStopping
from distributed.callbacks.freezing import Freeze
from distributed.callbacks.model_summary import ModelSummary

__all__ = [
    "AVERAGED_WEIGHTS", "GRADIENTS", "AveragedWeights", "Callback", "EarlyStopping", "ExponentialMovingAverage", "FitContext", "Freeze",
    "ModelSummary", "WeightAveraging",
]  # fmt: skip

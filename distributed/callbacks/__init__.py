"""Callbacks, a user's hooks into the training loop on every rank, and those that the package ships; what records a run belongs in `loggers`."""

from distributed.callbacks.averaging import ExponentialMovingAverage, WeightAveraging
from distributed.callbacks.base import (
    AVERAGED_WEIGHTS,
    COUNTS,
    GRADIENTS,
    NEEDS,
    SAMPLES,
    AveragedWeights,
    Callback,
    Counted,
    FitContext,
)
from distributed.callbacks.device_stats import DeviceStats
from distributed.callbacks.early_stopping import EarlyStopping
from distributed.callbacks.freezing import Freeze
from distributed.callbacks.gradient_histogram import GradientHistogram
from distributed.callbacks.model_summary import ModelSummary
from distributed.callbacks.samples import SampleImages, SampleText
from distributed.callbacks.throughput import ThroughputAndMFU

__all__ = [
    "AVERAGED_WEIGHTS", "COUNTS", "GRADIENTS", "NEEDS", "SAMPLES", "AveragedWeights", "Callback", "Counted", "DeviceStats",
    "EarlyStopping", "ExponentialMovingAverage", "FitContext", "Freeze", "GradientHistogram", "ModelSummary", "SampleImages",
    "SampleText", "ThroughputAndMFU", "WeightAveraging",
]  # fmt: skip

"""Find out from a metric's object or name whether smaller or larger values are better."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from distributed.metrics.over_all import OverAll

_SMALLER = {
    "loss", "losses", "logloss", "error", "errors", "err", "mse", "rmse", "mae", "mape", "msle", "rmsle", "nll",
    "perplexity", "ppl", "bpc", "bpb", "entropy", "crossentropy", "divergence", "kl", "distance", "regret", "hinge", "poisson",
    "deviance", "wer", "cer", "ter", "eer", "ece", "brier", "fid", "kid", "lpips", "false", "fpr", "fnr",
}  # fmt: skip
_LARGER = {
    "accuracy", "acc", "f1", "f2", "fbeta", "precision", "recall", "auc", "auroc", "auprc", "roc", "ap", "map", "mar", "r2",
    "bleu", "chrf", "rouge", "meteor", "iou", "miou", "jaccard", "dice", "mcc", "matthews", "kappa", "ndcg", "mrr", "psnr",
    "ssim", "score", "scores", "similarity", "sensitivity", "specificity", "reward", "rewards", "return", "returns", "corr",
    "correlation", "concordance", "pearson", "spearman", "kendall", "em", "match", "hit", "hits", "correct", "win", "wins",
    "top", "tpr", "tnr", "likelihood",
}  # fmt: skip
_NEGATED = {"neg", "negated", "negative"}
# A word in a name (upper case, lower case or capitalised), first without and then with the digits after it.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_WORD_WITH_DIGITS = re.compile(r"(?:[A-Z]+(?![a-z])|[A-Z]?[a-z]+)[0-9]*")
# Modules of losses. Their names do not always show the direction: Keras negates its cosine similarity.
_LOSSES = ("keras.losses", "keras.src.losses", "torch.nn.modules.loss")


def is_larger_better(name: str, metrics: Mapping[str, Any] | None = None) -> bool | None:
    """Return whether a larger value of the metric `name` is better, or None if that is unknown.

    The first of these sources that gives an answer counts: the metric object itself (`higher_is_better` of torchmetrics, or
    whether it is a loss of Keras or torch), the words in `name`, the words in the name of the object's class or of the function.

    Args:
        name: the name of the metric, with or without the prefix `val_`.
        metrics: the metrics of the Trainer, by name.
    """
    own = name.removeprefix("val_")
    metric = _metric_of(own, metrics or {})
    stated = getattr(metric, "higher_is_better", None)
    if isinstance(stated, bool):
        return stated
    if metric is not None and _home(metric).startswith(_LOSSES):
        return False
    by_name = _by_words(own)
    return by_name if by_name is not None or metric is None else _by_words(_called(metric))


def _metric_of(own: str, metrics: Mapping[str, Any]) -> Any:
    """Return the metric object that reports the value `own`. A metric with several values reports them as NAME_KEY."""
    if own in metrics:
        return _function_of(metrics[own])
    for name, metric in metrics.items():
        key = own.removeprefix(f"{name}_")
        if key != own and hasattr(metric, "keys") and key in metric.keys():  # noqa: SIM118  a collection of torchmetrics
            return metric[key]
    return None


def _function_of(metric: Any) -> Any:
    while isinstance(metric, (OverAll, functools.partial)):
        metric = metric.function if isinstance(metric, OverAll) else metric.func
    return metric


def _home(metric: Any) -> str:
    return str(getattr(metric if hasattr(metric, "__name__") else type(metric), "__module__", ""))


def _called(metric: Any) -> str:
    return str(getattr(metric, "__name__", type(metric).__name__))


def _by_words(name: str) -> bool | None:
    words = {word.lower() for pattern in (_WORD, _WORD_WITH_DIGITS) for word in pattern.findall(name)}
    if words & _NEGATED:
        return None
    if words & _SMALLER:
        return False
    return True if words & _LARGER else None

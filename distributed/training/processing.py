"""Read the arguments of a Trainer that concern tokenizers, batches and generated text, and check them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from distributed.errors import ConfigError
from distributed.metrics.over_all import OverAll, has_state, over_all


def processing_arguments(
    tokenizer: Any, processing_class: Any, collate_fn: Any, predict_with_generate: bool, generation_config: Any
) -> dict[str, Any]:
    """Return the fields of a `Job` that these arguments of `Trainer` set.

    Raises:
        ConfigError: an argument has a wrong type, or two of them contradict each other.
    """
    if tokenizer is not None and processing_class is not None and tokenizer is not processing_class:
        raise ConfigError(
            f"tokenizer={type(tokenizer).__name__} and processing_class={type(processing_class).__name__} are two names of one"
            " argument: drop one of them"
        )
    processing = processing_class if tokenizer is None else tokenizer
    name = "processing_class" if tokenizer is None else "tokenizer"
    if processing is not None and not callable(getattr(processing, "save_pretrained", None)):
        raise ConfigError(
            f"{name} is a {type(processing).__name__}, which has no save_pretrained(): pass a tokenizer or a processor of"
            " transformers, such as AutoTokenizer.from_pretrained(...)"
        )
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(
            f"collate_fn is a {type(collate_fn).__name__}: pass a function that makes a batch of a list of samples"
        )
    if generation_config is not None and not predict_with_generate:
        raise ConfigError(
            "generation_config has no effect without predict_with_generate=True: set that too, or drop generation_config"
        )
    return {
        "processing_class": processing,
        "collate_fn": collate_fn,
        "predict_with_generate": predict_with_generate,
        "generation_config": generation_config,
    }


def metrics_of_texts(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics that get the generated ids and the labels of all samples, in evaluation only.

    Raises:
        ConfigError: a metric is a name, or an object that is updated batch by batch.
    """
    for name, metric in metrics.items():
        if isinstance(metric, str):
            raise ConfigError(
                f"metrics[{name!r}]={metric!r} compares outputs with targets: pass a function (ids, labels) with"
                " predict_with_generate=True"
            )
        if has_state(metric):
            raise ConfigError(
                f"metrics[{name!r}] is a {type(metric).__name__}, which is updated in training too, where nothing is generated:"
                " pass a function (ids, labels) with predict_with_generate=True"
            )
    return {
        name: dataclasses.replace(metric, training=False)
        if isinstance(metric, OverAll)
        else over_all(metric, training=False)
        for name, metric in metrics.items()
    }

"""Generate ids in evaluation, with `model.generate` of transformers, for metrics of texts."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from distributed.backends._torch.objective import Loss
from distributed.backends.base import TARGET_NAMES
from distributed.data import sample_seed
from distributed.errors import ConfigError
from distributed.state import Job

if TYPE_CHECKING:
    from distributed.backends.torch_base import TorchBackend

# Entries of a batch that contain the targets. generate() must not get them.
_ANSWERS = {*TARGET_NAMES, "label_ids", "decoder_input_ids", "decoder_attention_mask"}
_DEFAULT_LENGTH = 20  # of transformers, if neither the model nor the user sets a length
_IGNORED = -100
_SALT = 7  # salt of the seeds; `fetching` uses 0 to 6


class Generation:
    """Replace the outputs of an evaluation batch by what the model generates for its inputs.

    If the model is sharded, all ranks run the same number of forward passes: a rank that has finished its texts continues until
    all ranks have finished (`synced_gpus`). The random numbers of training are not used.
    """

    def __init__(self, backend: TorchBackend[Any], job: Job) -> None:
        """Read the configuration. Raises ConfigError if the model does not generate or the configuration is wrong."""
        self._backend: TorchBackend[Any] = backend
        self._model: Any = backend.plain
        if not callable(getattr(self._model, "generate", None)):
            kind = type(self._model).__name__
            raise ConfigError(
                f"predict_with_generate=True needs a model with generate(), but {kind} has none: use one of transformers, such as"
                " AutoModelForSeq2SeqLM, or drop predict_with_generate"
            )
        _check_signature(self._model)
        self._config = _merged(getattr(self._model, "generation_config", None), job.generation_config)
        if (number := self._config.num_return_sequences or 1) != 1:
            raise ConfigError(
                f"num_return_sequences={number} of the generation_config makes {number} texts of a sample, and metrics compare one"
                " with its labels: set generation_config={'num_return_sequences': 1}"
            )
        config = getattr(self._model, "config", None)
        self._is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self._pad = _first_id(
            self._config.pad_token_id, getattr(config, "pad_token_id", None), self._config.eos_token_id
        )
        longest = self._config.max_new_tokens or self._config.max_length or _DEFAULT_LENGTH
        self._length = longest + bool(self._config.max_new_tokens and self._is_encoder_decoder)

    def replace(self, loss: Loss, batch: Any) -> Loss:
        """Return `loss` with generated ids [batch, length] as outputs and the labels [batch, length] as targets. A collective."""
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"predict_with_generate=True needs batches that are dicts, and this one is a {type(batch).__name__}: yield dicts"
                " with the arguments of the model"
            )
        target = next((name for name in ("labels", *TARGET_NAMES) if name in batch), None)
        ids = self._generated({name: value for name, value in batch.items() if name not in _ANSWERS})
        targets = batch[target] if target is not None else loss.targets
        if isinstance(targets, torch.Tensor) and targets.dim() == 2:
            targets = _filled(targets, self._length, _IGNORED)
        return dataclasses.replace(loss, outputs=_filled(ids, self._length, self._pad), targets=targets)

    def _generated(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        backend, context = self._backend, self._backend.context
        if not self._is_encoder_decoder and "input_ids" not in inputs:
            raise ConfigError(
                f"predict_with_generate=True got a batch with {', '.join(inputs)} and without input_ids, after which ids are cut:"
                " rename the entry with the prompts to input_ids"
            )
        is_cut = backend.observer.cuts_weights and context.world_size > 1
        seed = sample_seed(backend.config.seed, backend.measured.num_evaluated, context.rank, _SALT)
        # generate() calls the encoder by itself.
        with backend.generators.untouched(), backend.wrapper.outermost_gathered():
            backend.generators.seed(seed)
            ids: torch.Tensor = self._model.generate(**inputs, generation_config=self._config, synced_gpus=is_cut)
        return ids if self._is_encoder_decoder else ids[:, inputs["input_ids"].shape[1] :]


def _check_signature(model: Any) -> None:
    """Raise ConfigError if a `generate` of the user does not take the arguments that it is called with."""
    parameters = inspect.signature(model.generate).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    missing = [name for name in ("generation_config", "synced_gpus") if name not in parameters and not takes_any]
    if missing:
        raise ConfigError(
            f"generate() of a {type(model).__name__} does not take {' and '.join(missing)}, with which predict_with_generate=True"
            " calls it: add them, as in transformers"
        )


def _merged(own: Any, given: Any) -> Any:
    """Return the configuration that the user gave, or that of the model with the user's entries."""
    if given is not None and not isinstance(given, Mapping):
        if not hasattr(given, "max_new_tokens"):
            raise ConfigError(
                f"generation_config is a {type(given).__name__}: pass a dict, {{'max_new_tokens': 32}}, or a GenerationConfig"
            )
        return copy.deepcopy(given)
    from transformers import GenerationConfig

    config = GenerationConfig() if own is None else copy.deepcopy(own)
    if unknown := [name for name in given or {} if not hasattr(config, name)]:
        raise ConfigError(f"generation_config has no {', '.join(unknown)}: see GenerationConfig of transformers")
    config.update(**(given or {}))
    return config


def _first_id(*candidates: Any) -> int:
    """Return the first token id among `candidates`, of which some are None or lists."""
    ids = [each[0] if isinstance(each, (list, tuple)) else each for each in candidates]
    return next((int(each) for each in ids if each is not None), 0)


def _filled(ids: torch.Tensor, length: int, value: int) -> torch.Tensor:
    """Return `ids` [batch, n] filled with `value` on the right up to `length`, so that batches can be joined."""
    return F.pad(ids, (0, max(0, length - ids.shape[1])), value=value)

"""Make the setup of a fit that a finder runs from the setup of the Trainer that it is called on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.callbacks import Callback
from distributed.config.fields import rules
from distributed.config.settings import CHECKPOINTS, MONITORING, VALIDATION, DistributedConfig
from distributed.errors import ConfigError
from distributed.state import Job
from distributed.training.fit_request import FitRequest
from distributed.training.fits import Fits
from distributed.training.setup import SettingLayers, Setup

_DROPPED = {
    "scheduler",
    "scheduler_interval",
    "scheduler_steps",
    "scheduler_power",
    "scheduler_decay_ratio",
    "min_learning_rate",
} | {name for name, rule in rules(DistributedConfig).items() if rule.section in (MONITORING, CHECKPOINTS, VALIDATION)}


def finder_setup(
    setup: Setup,
    request: FitRequest,
    settings: Mapping[str, Any],
    *,
    job: Job,
    callbacks: Sequence[Callback],
    sweep: Mapping[str, Any] | None = None,
) -> Setup:
    """Return the setup of a fit of `job` with the settings of `setup`, without those for checkpoints, logging and schedules.

    Args:
        setup: the setup of the Trainer.
        request: what the fit does besides training.
        settings: settings that replace those in code.
        job, callbacks: what is trained.
        sweep: settings that replace those of a sweep. They also override the batch size of a DataLoader.
    """
    return setup.for_request(request, job, callbacks, _replaced(setup.layers, settings, sweep or {}))


def _replaced(layers: SettingLayers, settings: Mapping[str, Any], sweep: Mapping[str, Any]) -> SettingLayers:
    dropped = {*_DROPPED, *settings, *sweep}

    def kept(layer: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in layer.items() if name not in dropped}

    given = layers.overrides
    overrides = dataclasses.replace(given, file=kept(given.file), flag=kept(given.flag), notices=())
    return dataclasses.replace(
        layers, code={**kept(layers.code), **settings}, sweep={**kept(layers.sweep), **sweep}, overrides=overrides
    )


def check_unused(fits: Fits, call: str) -> None:
    """Raise ConfigError if a trainer has trained or started to train, or if its workers would be on several nodes."""
    if fits.setup.is_fit_in_workers and fits.setup.plan.num_nodes > 1:
        raise ConfigError(
            f"{call} starts the workers of one machine only: call it without num_nodes, or in a script that is started on each node"
            " with 'python -m distributed.cli train'"
        )
    if fits.is_used:
        raise ConfigError(
            f"{call} trains a copy of the untrained model, but this trainer has used its model already:"
            " call it before fit, evaluate, predict and save, or on a new Trainer"
        )

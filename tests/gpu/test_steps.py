"""Between two log lines the host never waits for the GPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpu_support import CLASSES, During, Net, SyncMode, data, loader, trainer
from torch import nn

from distributed.callbacks import ExponentialMovingAverage

FIRST, LAST = 6, 18  # the updates after which the check begins and ends
SAMPLES = 24 * 32  # one epoch, with a log line at its end only
QUIET = {"epochs": 1, "log_every_n_steps": 1000}


def in_pairs(outputs, targets):
    """Return a loss as (sum, count)."""
    return nn.functional.cross_entropy(outputs, targets, reduction="sum"), float(len(targets))


CASES = {
    "adamw": {"optimizer": None},
    "sgd": {},
    "clipping": {"gradient_clipping": 1.0},
    "bf16": {"mixed_precision": "bf16", "gradient_clipping": 1.0},
    "accumulation": {"gradient_accumulation_steps": 2, "batch_size": 16},
    "nan_policy=warn": {"nan_policy": "warn"},
    "sums": {"loss_fn": in_pairs},
    "schedule": {"scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 99)},
    "metric": {"metrics": {"mean": lambda outputs, targets: outputs.mean()}},
    "recomputing": {"activation_checkpointing": True},
    "averaged weights": {"callbacks": [ExponentialMovingAverage(0.9)]},
}


@pytest.mark.parametrize("name", CASES)
def test_no_update_waits_for_the_gpu(gpu, name):
    gpu("a device that works while the host goes on")
    looking = During(SyncMode("error"), FIRST, LAST)
    settings = {**QUIET, **CASES[name]}
    callbacks = [looking, *settings.pop("callbacks", ())]
    trainer(Net(), callbacks=callbacks, **settings).fit(data(SAMPLES))


def test_nor_with_pinned_batches_and_class_weights(gpu):
    gpu("a device that works while the host goes on")
    weighted = nn.CrossEntropyLoss(weight=torch.ones(CLASSES), ignore_index=-1)
    looking = During(SyncMode("error"), FIRST, LAST)
    trainer(Net(), callbacks=[looking], loss_fn=weighted, **QUIET).fit(loader(SAMPLES))


@pytest.mark.parametrize(
    ("settings", "per_step"),
    [({"nan_policy": "skip"}, 1), ({"mixed_precision": "fp16", "scaler_init_scale": 256.0}, 2)],
)
def test_an_update_that_may_be_left_out_waits_for_the_verdict_alone(gpu, settings, per_step):
    gpu("a device that works while the host goes on")
    looking = During(SyncMode("warn"), FIRST, LAST)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(Net(), callbacks=[looking], **{**QUIET, **settings}).fit(data(SAMPLES))
    waits = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    assert LAST - FIRST <= len(waits) <= per_step * (LAST - FIRST), [str(each) for each in waits[:5]]


def test_what_waits_is_found(gpu):
    gpu("a device that works while the host goes on")

    def step(model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.item()
        return loss

    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        trainer(Net(), callbacks=[During(SyncMode("error"), FIRST, LAST)], training_step=step, **QUIET).fit(
            data(SAMPLES)
        )

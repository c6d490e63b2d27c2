"""Print the error of every Keras job that must be refused, as one JSON object, name -> text."""

import json

import keras
import torch
from torch.utils.data import TensorDataset

from distributed import ConfigError, Trainer

DATA = TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,)))


def net():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return {}


def built_elsewhere():
    optimizer = keras.optimizers.Adam()
    optimizer.build(net().trainable_variables)
    return optimizer


def frozen():
    model = net()
    model.trainable = False
    return model


optimizers, losses = keras.optimizers, keras.losses
decay = optimizers.schedules.CosineDecay(0.1, 10)
CASES = {
    "own step": (lambda: OwnStep([keras.Input((4,)), keras.layers.Dense(3)]), {}),
    "torch optimizer": (net, {"optimizer": lambda v: torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])}),
    "torch schedule": (net, {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1)}),
    "accumulating": (net, {"optimizer": optimizers.SGD(gradient_accumulation_steps=2)}),
    "scaling": (net, {"optimizer": optimizers.SGD(loss_scale_factor=8.0)}),
    "loss scale": (net, {"optimizer": optimizers.LossScaleOptimizer(optimizers.SGD())}),
    "averages": (net, {"optimizer": optimizers.SGD(use_ema=True)}),
    "other variables": (net, {"optimizer": built_elsewhere()}),
    "frozen": (frozen, {}),
    "rate of a schedule": (net, {"optimizer": optimizers.SGD(decay), "learning_rate": 0.1}),
    "epochs of a schedule": (net, {"optimizer": optimizers.SGD(decay), "scheduler_interval": "epoch"}),
    "sum": (net, {"loss_fn": losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")}),
    "muon": (net, {"optimizer": "muon"}),
    "layer rates": (net, {"optimizer": "adamw", "layer_rates": {"nosuch": 0.1}}),
    "recomputing": (net, {"activation_checkpointing": True}),
    "several models": (None, {"models": {"a": net}, "training_step": lambda models, batch, update: None}),
    "fsdp": (net(), {"backend": "fsdp"}),
    "deepspeed": (net(), {"backend": "deepspeed"}),
}
found = {}
for name, (model, settings) in CASES.items():
    try:
        Trainer(model, checkpoint_frequency=None, verbose=False, **settings).fit(DATA)
        found[name] = "not refused"
    except ConfigError as error:
        found[name] = str(error)
print(json.dumps(found))

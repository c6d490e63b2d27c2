"""Train the model and data of restarts_hand_written.py with our Trainer: train --script restarts_trainer.py -- DIR."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer
from marks import stepped


class Watch(Callback):
    def __init__(self, directory: str) -> None:
        self.directory, self.rank = directory, int(os.environ["RANK"])

    def on_step_end(self, state, result) -> None:
        stepped(self.directory, self.rank, state.step)
        time.sleep(0.02)


def main(directory: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(6400, 32)
    data = TensorDataset(inputs, inputs[:, :10].argmax(1))
    trainer = Trainer(
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)), epochs=1000, checkpoint_every_n_steps=10,
        callbacks=[Watch(directory)],
    )  # fmt: skip
    trainer.fit(DataLoader(data, batch_size=32, shuffle=True))


if __name__ == "__main__":
    main(sys.argv[1])

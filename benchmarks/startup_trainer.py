"""Train the model and data of startup_hand_written.py with our Trainer: train --script startup_trainer.py -- DIR."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer
from marks import pause, reached


class Watch(Callback):
    def __init__(self, directory: str, is_main_process: bool) -> None:
        self.directory, self.is_main_process = directory, is_main_process

    def on_step_end(self, state, result) -> None:
        if self.is_main_process and state.step == 1:
            reached(self.directory, "first-step")
        if self.is_main_process and state.step == 50:
            pause(self.directory)


def main(directory: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(6400, 32)
    data = TensorDataset(inputs, inputs[:, :10].argmax(1))
    trainer = Trainer(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)))
    trainer.callbacks.append(Watch(directory, trainer.is_main_process))
    trainer.fit(DataLoader(data, batch_size=32, shuffle=True))


if __name__ == "__main__":
    main(sys.argv[1])

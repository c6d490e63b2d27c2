"""Fit a model that torch.export cannot hold, and log a text, a table, audio and a figure."""

import torch
from torch.utils.data import TensorDataset

from distributed import Callback, Trainer
from distributed.loggers import Audio, Figure, Table, Text


class Branching(torch.nn.Module):
    """Take one of two layers, as the values of the batch decide."""

    def __init__(self):
        super().__init__()
        self.body, self.other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.body(x) if x.sum() > 0 else self.other(x) + 0 * self.body(x)


class Drawn:
    def savefig(self, file, **options):
        file.write(f"drawn as {options['format']}".encode())


class Shows(Callback):
    def on_epoch_end(self, state, metrics):
        self.context.log("story", Text("Once upon a time\n"))
        self.context.log("scores", Table(["name", "score"], [["one", 1], ["two, three", 2.5]]))
        self.context.log("beep", Audio(torch.tensor([0.0, 1.0, -1.0, 0.5]), 8000))
        self.context.log("plot", Figure(Drawn()))


x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x.sum(1) > 0).long())
Trainer(Branching(), batch_size=4, epochs=1, optimizer="sgd", learning_rate=0.1, callbacks=[Shows()]).fit(data)

"""Find batch sizes with a model for which one rank has too little memory above 16 samples, and print the results."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer

DATA = TensorDataset(torch.randn(100, 4), torch.zeros(100, dtype=torch.int64))


class Greedy(torch.nn.Linear):
    """Ask for a petabyte on the last rank, while the others continue to the exchange of gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) > 16 and os.environ.get("RANK") == sys.argv[1]:
            torch.empty(1 << 50)
        return super().forward(x)


def main() -> None:
    model = Greedy(4, 2)
    before = [value.tolist() for value in model.state_dict().values()]
    adam = torch.optim.Adam(model.parameters())
    several = Trainer(model, optimizer=adam, nproc_per_node=2, batch_size=32, device="cpu")
    alone = Trainer(torch.nn.Linear(4, 2), nproc_per_node=1, device="cpu")
    seen = {
        "several": several.find_batch_size(DataLoader(DATA, batch_size=4), start=16, max_size=64),
        "beyond the data": alone.find_batch_size(DATA, start=100, max_size=1000),
        "is_untouched": before == [value.tolist() for value in several.model.state_dict().values()],
        "left": [path.name for path in Path.cwd().iterdir()],
        "trained": len(alone.fit(DATA, epochs=1).rows),
    }
    print("SEEN", json.dumps(seen))


if __name__ == "__main__":
    main()

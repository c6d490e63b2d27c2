"""Classify handwritten digits on any number of processes: 1,797 real 8x8 images, a small convolutional net, held-out
accuracy.

python examples/train.py
python -m distributed.cli train --script examples/train.py --backend pytorch-ddp --nproc-per-node 2
"""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 80 % of the images for training and 20 % for evaluation. The split is the same in every process and
    every run."""
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)  # [images, 1, 8, 8], 0 to 1
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def main() -> None:
    train, held_out = digits()
    trainer = Trainer(net, epochs=12, learning_rate=3e-3)
    history = trainer.fit(DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=256))
    accuracy = trainer.evaluate(held_out)["accuracy"]
    if trainer.is_main_process:
        curves = Path(history.run_dir, "curves.png")
        history.plot(curves)
        print(f"held-out accuracy {accuracy:.4f}")
        print(f"curves {curves}")


if __name__ == "__main__":
    main()

"""Classify handwritten digits with a loop of this script, on any torch backend and any number of processes.

python examples/own_loop.py
python -m distributed.cli train --script examples/own_loop.py --backend fsdp --nproc-per-node 2
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import distributed


def digits() -> tuple[DataLoader, DataLoader]:
    """Return 80 % of the images for training and 20 % for evaluation, the same in every process and every run."""
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    parts = [TensorDataset(images[part].float() / 16, labels[part]) for part in (order[:1437], order[1437:])]
    return DataLoader(parts[0], batch_size=32, shuffle=True), DataLoader(parts[1], batch_size=256)


def main() -> None:
    with distributed.Session(epochs=10, scheduler="cosine", gradient_clipping=1.0) as s:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        model, optimizer, loader, held_out = s.prepare(model, optimizer, *digits())
        s.resume()
        for _ in s.epochs():
            model.train()
            for images, labels in loader:
                s.backward(cross_entropy(model(images), labels))
                s.update()
            model.eval()
            answers = []
            for images, labels in held_out:
                with torch.no_grad():
                    answers.append(s.gather(model(images).argmax(1) == labels))
            accuracy = torch.cat(answers).float().mean()
            s.log("val_accuracy", accuracy)
        if s.is_main_process:
            print(f"held-out accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()

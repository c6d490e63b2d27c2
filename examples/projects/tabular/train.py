"""Classify the rows of a table: 569 tumours with 30 measured features, held-out accuracy and area under the ROC curve.

python train.py
distributed train --script train.py --nproc-per-node 2
"""

from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer, over_all


def table() -> tuple[TensorDataset, TensorDataset]:
    """Return 80 % of the rows for training and 20 % for evaluation, the same ones in every process and every run."""
    features, classes = load_breast_cancer(return_X_y=True)  # your table: numbers [rows, columns], classes [rows]
    features = torch.tensor(features, dtype=torch.float32)
    classes = torch.tensor(classes)
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    train, held_out = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    # Columns have different units. The scale is that of the training rows: the others must not be looked at.
    features = (features - features[train].mean(0)) / features[train].std(0)
    return TensorDataset(features[train], classes[train]), TensorDataset(features[held_out], classes[held_out])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))


def auroc(outputs: torch.Tensor, classes: torch.Tensor) -> float:
    """Return the area under the ROC curve, which is no mean over batches: `over_all` computes it over all rows."""
    return roc_auc_score(classes, outputs[:, 1] - outputs[:, 0])


if __name__ == "__main__":
    train, held_out = table()
    trainer = Trainer(net, Path(__file__).with_name("config.yaml"), metrics={"auroc": over_all(auroc)})
    trainer.fit(train, held_out)
    measured = trainer.evaluate(held_out)
    if trainer.is_main_process:
        print(f"held-out accuracy {measured['accuracy']:.4f}, area under the ROC curve {measured['auroc']:.4f}")

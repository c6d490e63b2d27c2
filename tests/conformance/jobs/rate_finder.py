"""Find a learning rate, train, and write the results. Arguments: the directory for the results, and settings as JSON.

Each worker writes where a launcher started it. Otherwise this process writes.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer

RANK = int(os.environ.get("RANK", 0))
generator = torch.Generator().manual_seed(7)
x = torch.randn(240, 6, generator=generator)
DATA = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long() + 2 * (x[:, 2] > 0))


class Count(Callback):
    steps = 0

    def on_train_start(self, state: Any) -> None:
        Count.steps = state.step

    def on_step_end(self, state: Any, result: Any) -> None:
        Count.steps += 1


def trainer(**settings: Any) -> Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4)
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return Trainer(
        model, optimizer=optimizer, scheduler=schedule, callbacks=[Count()], epochs=2, global_batch_size=48,
        early_stopping_patience=1, monitor="accuracy", monitor_mode="max", tensorboard=True, **settings,
    )  # fmt: skip


def state_of(model: torch.nn.Module) -> list[Any]:
    drawn = torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state())
    return [*drawn, {name: value.tolist() for name, value in model.state_dict().items()}]


def trained(one: Trainer) -> dict[str, Any]:
    history = one.fit(DATA)
    weights = torch.nn.utils.parameters_to_vector(one.model.parameters()).tolist()
    return {"run_dir": history.run_dir, "weights": weights, "losses": [row["loss"] for row in history.rows]}


def main(out: Path, settings: dict[str, Any]) -> None:
    gc.disable()  # so that garbage of the finder is not collected by chance
    finding = trainer(**settings)
    before = state_of(finding.job.model)
    curve = finding.find_learning_rate(DataLoader(DATA, shuffle=True), max_rate=100.0)
    num_models = sum(type(each) is torch.nn.BatchNorm1d for each in gc.get_objects())
    is_untouched = state_of(finding.job.model) == before and not finding.job.optimizer.state
    seen = {
        "rates": curve.rates, "losses": curve.losses, "suggestion": curve.suggestion, "num_models": num_models, "is_untouched": is_untouched,
        "user_callbacks": Count.steps, "after": trained(finding),
    }  # fmt: skip
    if "nproc_per_node" not in settings:  # in workers of `fit` this would be the same and cost another start
        seen["plain"] = trained(trainer(**settings))
    (out / f"seen-{RANK}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

"""Train on a stream of Hugging Face's `datasets`, and write the weights: dataset_stream.py OUT KIND [--dtype DTYPE] [--kill STEP]

KIND is "table", a stream of which each rank reads its rows, "mapped", one that a function maps, or "shuffled", one that is also shuffled
in a buffer.
"""

import argparse
from pathlib import Path

import datasets
import torch
from torch.nn.functional import mse_loss

from distributed import Trainer
from tests.conformance.jobs.streams import Kill

SAMPLES, GLOBAL, EPOCHS = 61, 8, 2  # the last update of an epoch is short
UPDATES = -(-SAMPLES // GLOBAL)
KILLED = UPDATES + 5  # inside the second epoch; the newest checkpoint is of the update before


def scaled(row):
    return {"x": [value / 2 for value in row["x"]], "y": row["y"]}


def stream(kind):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 4, generator=draw, dtype=torch.float64)
    rows = datasets.Dataset.from_dict({"x": x.tolist(), "y": x.sum(1, keepdim=True).tanh().tolist()})
    made = rows.to_iterable_dataset(num_shards=3)
    if kind == "table":
        return made
    return made.map(scaled) if kind == "mapped" else made.map(scaled).shuffle(seed=5, buffer_size=7)


def step(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("kind")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--kill", type=int, default=0)
    given = parser.parse_args()
    trainer = Trainer(
        lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)), training_step=step,
        global_batch_size=GLOBAL, epochs=EPOCHS, learning_rate=0.05, dtype=given.dtype, device="cpu", seed=3, keep_latest_k=20,
        checkpoint_every_n_steps=4, callbacks=[Kill(given.kill, given.out / "killed")],
    )  # fmt: skip
    trainer.fit(stream(given.kind))
    trainer.save(given.out / "weights.safetensors")


if __name__ == "__main__":
    main()

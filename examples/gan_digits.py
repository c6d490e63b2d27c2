"""Train a generator and a critic of digits on any number of processes: 1,797 real 8x8 images, one optimizer for each.

python -m distributed.cli train --script examples/gan_digits.py --backend pytorch-ddp --nproc-per-node 2
"""

from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import Dataset

from distributed import Trainer

DEPTH, RATES = 16, {"g": 5e-4, "d": 1e-3}


class Digits(Dataset):
    """Images, each with the noise for its step. A sample draws the same noise on any number of processes."""

    def __init__(self) -> None:
        self.images = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)  # [images, 64], -1 to 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.images[index], torch.randn(DEPTH), 0.7 * torch.randn(3, 64)


def net(*sizes: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.SiLU())]
    return nn.Sequential(*layers[:-1])


def step(models, batch, update) -> None:
    real, drawn, blur = batch  # the blur keeps the critic from telling images apart too easily
    critic, fake = models["d"], models["g"](drawn).tanh()
    update("d", (softplus(-critic(real + blur[:, 0])) + softplus(critic(fake.detach() + blur[:, 1]))).mean())
    update("g", softplus(-critic(fake + blur[:, 2])).mean())


def main() -> None:
    trainer = Trainer(
        models={"g": lambda: net(DEPTH, 128, 128, 64), "d": lambda: net(64, 128, 128, 1)},
        optimizers={name: lambda p, rate=rate: torch.optim.Adam(p, rate, (0.5, 0.9)) for name, rate in RATES.items()},
        training_step=step, epochs=40, global_batch_size=64,
    )  # fmt: skip
    digits = Digits()
    trainer.fit(digits)
    if trainer.is_main_process:
        g = trainer.model["g"]
        drawn = g(torch.randn(512, DEPTH).to(g[0].weight)).tanh()
        away = (drawn.mean(0).cpu() - digits.images.mean(0)).abs().mean()
        print(f"the mean of 512 drawn digits is {away:.3f} away from that of the real ones, with pixels from -1 to 1")


if __name__ == "__main__":
    main()

"""Compare an Adasum update on two ranks with the formula of its paper (arXiv 2006.02924), layer by layer. Prints the difference."""

import json

import torch
from torch.utils.data import TensorDataset

from distributed import HorovodTrainer

generator = torch.Generator().manual_seed(3)
x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
y = torch.randint(0, 3, (8,), generator=generator)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
before = [p.detach().clone() for p in model.parameters()]
halves = []
for half in (slice(0, None, 2), slice(1, None, 2)):
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(x[half]), y[half]).backward()
    halves.append([p.grad.clone() for p in model.parameters()])
model.zero_grad()


def adasum(a, b):
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


trainer = HorovodTrainer(
    model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), adasum=True, batch_size=4, max_steps=1, shuffle=False,
    dtype="float64", verbose=False,
)  # fmt: skip
trainer.fit(TensorDataset(x, y))
moved = [(b - p.detach()) / 0.5 for b, p in zip(before, model.parameters(), strict=True)]
paper = [adasum(a, b) for a, b in zip(*halves, strict=True)]
mean = [(a + b) / 2 for a, b in zip(*halves, strict=True)]


def apart(others):
    return max((m - o).abs().max().item() for m, o in zip(moved, others, strict=True))


if trainer.is_main_process:
    print(json.dumps({"from_paper": apart(paper), "from_average": apart(mean)}), flush=True)

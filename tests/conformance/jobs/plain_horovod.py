"""Train on digits as the guides of Horovod show it, without this package: a sampler for each rank, and averaged accuracy."""

import argparse
import json

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
arguments = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
train, test = TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, batch_size=32, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()

mine = slice(hvd.rank(), None, hvd.size())
correct = (model(test[0][mine]).argmax(1) == test[1][mine]).float().mean()
accuracy = hvd.allreduce(correct, name="accuracy").item()
sums = hvd.allgather(model[0].weight.detach().sum().reshape(1), name="weights")
if hvd.rank() == 0:
    found = {"size": hvd.size(), "accuracy": accuracy, "apart": (sums - sums[0]).abs().max().item()}
    print(json.dumps(found), flush=True)

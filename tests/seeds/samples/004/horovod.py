# 004, "Horovod". Changed: imports; the CPU.
import horovod.torch as hvd
import torch
from torch.nn import functional as F

# Initialize Horovod
hvd.init()

# Build model
model = YourModel()

# Horovod: scale learning rate
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())

# Horovod: wrap optimizer
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters()
)

# Horovod: broadcast initial parameters
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

# Training loop
for epoch in range(epochs):
    for data, target in train_loader:
        optimizer.zero_grad()
        output = model(data)
        loss = F.cross_entropy(output, target)
        loss.backward()
        optimizer.step()

# Launch with horovodrun
# horovodrun -np 4 -H localhost:4 python train.py

# 000, "Data Parallel Training". Changed: import; an optimizer of this model.
import torch
from distributed import DistributedDataParallel, init_process_group

# Initialize distributed training
init_process_group(backend="nccl")

# Wrap your model for distributed training
model = MyTransformerModel()
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

# Training loop - gradients automatically synchronized
for batch in dataloader:
    output = ddp_model(batch)
    loss = criterion(output, targets)
    loss.backward()  # Gradients sync across all processes
    optimizer.step()

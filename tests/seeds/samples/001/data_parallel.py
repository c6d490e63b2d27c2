# 001, "Data Parallel Training". Changed: import; an optimizer of this model.
import torch
from distributed import DistributedDataParallel, init_process_group

# Initialize distributed training (CPU backend recommended for now)
init_process_group(backend="gloo")  # Use "nccl" only if CuPy is installed

# Wrap your model for distributed training
model = MyTransformerModel()
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

# Training loop - gradients manually synchronized
for batch in dataloader:
    output = ddp_model(batch)
    loss = criterion(output, targets)
    loss.backward()
    ddp_model.sync_gradients()  # Manual sync required currently
    optimizer.step()

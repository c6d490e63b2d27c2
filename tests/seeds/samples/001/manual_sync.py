# 001, "Gradient Synchronization Issues". Changed: import.
from distributed import DistributedDataParallel

# Problem: Gradients not synchronized automatically
# Solution: Use manual synchronization

# Current implementation requires manual sync
for batch in dataloader:
    output = model(batch)
    loss = criterion(output, targets)
    loss.backward()

    # REQUIRED: Manual gradient synchronization
    if isinstance(model, DistributedDataParallel):
        model.sync_gradients()

    optimizer.step()
    optimizer.zero_grad()

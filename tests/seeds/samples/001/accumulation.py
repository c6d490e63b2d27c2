# 001, "Gradient Synchronization Control". Changed: import.
from distributed import no_sync

# Manual gradient accumulation (no_sync is a placeholder)
for micro_batch in micro_batches[:-1]:
    output = model(micro_batch)
    loss = criterion(output, targets)
    loss.backward()  # Gradients accumulate locally
    # No automatic sync occurs

# Final batch with manual synchronization
output = model(micro_batches[-1])
loss = criterion(output, targets)
loss.backward()
model.sync_gradients()  # Manual sync required

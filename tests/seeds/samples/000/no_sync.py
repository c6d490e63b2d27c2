# 000, "Gradient Synchronization Control". Changed: import.
from distributed import no_sync

# Accumulate gradients without synchronization
with no_sync():
    for micro_batch in micro_batches[:-1]:
        output = model(micro_batch)
        loss = criterion(output, targets)
        loss.backward()  # No gradient sync

# Final batch with synchronization
output = model(micro_batches[-1])
loss = criterion(output, targets)
loss.backward()  # Gradients synchronized here

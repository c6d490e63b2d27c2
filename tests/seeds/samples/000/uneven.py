# 000, "Gradient Synchronization Issues". Nothing is changed.
# Problem: Gradients not synchronized properly
# Solution: Ensure all processes call backward()

# Make sure all ranks participate in gradient computation
if batch is not None:  # Handle uneven batch distribution
    output = model(batch)
    loss = criterion(output, targets)
    loss.backward()
else:
    # Create dummy loss for synchronization
    dummy_loss = sum(p.sum() * 0 for p in model.parameters())
    dummy_loss.backward()

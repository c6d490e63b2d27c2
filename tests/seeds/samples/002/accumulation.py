# 002, "Gradient Accumulation". Changed: import; the batch.
from distributed import PyTorchDDPTrainer

trainer = PyTorchDDPTrainer(
    model=model,
    batch_size=8,  # Per GPU
    gradient_accumulation_steps=8  # Effective batch = 32 × 8 × num_gpus
)

# With 4 GPUs:
# Effective batch size = 32 × 8 × 4 = 1024

# 002, "Gradient Accumulation for Memory". Changed: import; 2 processes on CPUs instead of 4 GPUs, the batch.
from distributed import PyTorchDDPTrainer

# Want batch size 512, but only fits 64 per GPU
# Use gradient accumulation

trainer = PyTorchDDPTrainer(
    model=model,
    batch_size=8,
    gradient_accumulation_steps=8,  # 64 × 8 = 512
    nproc_per_node=2
)

# Effective batch = 64 × 8 × 4 = 2048

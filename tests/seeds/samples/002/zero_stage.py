# 002, "Large Model Training". Changed: import; 2 processes on CPUs instead of 4 GPUs.
from distributed import PyTorchDDPTrainer

# Model: 30GB parameters
# Single GPU: 16GB - doesn't fit!
# 4 GPUs with ZeRO: 64GB total - fits!

trainer = PyTorchDDPTrainer(
    model=large_model,
    nproc_per_node=2,
    zero_stage=3  # Partition everything
)

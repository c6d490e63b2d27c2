# 002, "Checkpointing for Fault Tolerance". Changed: import; a checkpoint each epoch.
from distributed import PyTorchDDPTrainer

trainer = PyTorchDDPTrainer(
    model=model,
    checkpoint_frequency=1,
    checkpoint_dir="./checkpoints",
    resume_from_checkpoint=True  # Auto-resume if training crashes
)

# Saves:
# - Model weights
# - Optimizer state
# - Learning rate scheduler
# - Training step
# - RNG state

# 002, "TensorBoard Integration". Changed: import.
from distributed import PyTorchDDPTrainer

trainer = PyTorchDDPTrainer(
    model=model,
    tensorboard_dir="./runs",
    log_every_n_steps=10
)

# Automatically logs:
# - Training loss
# - Validation metrics
# - Learning rate
# - Gradient norms
# - GPU utilization

# 002, "Mixed Precision Training". Changed: import.
from distributed import PyTorchDDPTrainer

trainer = PyTorchDDPTrainer(
    model=model,
    mixed_precision=True,
    scaler_init_scale=2**16,  # For numerical stability
    scaler_growth_interval=2000
)

# Automatic mixed precision
# - FP16 for forward/backward
# - FP32 for weight updates
# - Gradient scaling to prevent underflow

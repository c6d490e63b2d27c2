# 002, "Python API". Changed: 2 processes on CPUs instead of 4 GPUs, epochs.
from distributed import PyTorchDDPTrainer
import torch.nn as nn

# Define your model
model = MyModel()

# Create distributed trainer
trainer = PyTorchDDPTrainer(
    model=model,
    nproc_per_node=2,
    batch_size=32,
    epochs=2
)

# Train - automatically distributed!
trainer.fit(train_loader, val_loader)

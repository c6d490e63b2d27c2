# 002, "Fast Experimentation". Changed: import; 2 processes on CPUs instead of 8 GPUs.
from distributed import PyTorchDDPTrainer

# Baseline: 24 hours on 1 GPU
# Distributed: 3 hours on 8 GPUs

trainer = PyTorchDDPTrainer(model, nproc_per_node=2)
trainer.fit(train_loader, val_loader)
